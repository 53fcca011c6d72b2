"""The `quantlab` command line: thin click commands over the library."""
