import json
import subprocess

from quantlab.study.provenance import git_revision, provenance, versions


def test_provenance_is_json_and_names_versions():
    record = provenance("cpu")
    json.dumps(record, allow_nan=False)
    assert record["versions"]["torch"] and record["device"] == "cpu"
    assert set(versions()) >= {"torch", "transformers", "numpy"}


def test_git_revision(tmp_path):
    def git(*arguments):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path), *arguments],
            check=True,
            capture_output=True,
        )

    assert git_revision(tmp_path) is None
    git("init")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "x")
    clean = git_revision(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "a").write_text("2")
    assert git_revision(tmp_path)["dirty"] is True
