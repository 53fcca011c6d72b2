"""Public benchmarks: manifests, questions, answers out of outputs, and grading."""
