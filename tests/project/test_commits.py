"""Subjects of commits are short enough to be read in a list, from the commit on that said so."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUBJECT_CHARACTERS_MAX = 72

# "Move modules into packages by responsibility": the first commit under this rule.
FIRST = "70c915970d94f765fed86018f4ead168da6d5a24"


def test_subjects_of_commits_have_at_most_72_characters_and_no_full_stop() -> None:
    wrong = [
        line
        for line in subjects_since(FIRST)
        if len(line) > SUBJECT_CHARACTERS_MAX or line.endswith(".")
    ]

    assert wrong == [], "see CONTRIBUTING.md; `git commit --amend`, or `git rebase -i`, mends it"


def test_a_folder_without_this_history_has_no_subjects_to_check(tmp_path: Path) -> None:
    """An exported tree or a shallow clone is checked by the repository that it came from."""
    assert subjects_since(FIRST, folder=tmp_path) == []
    assert subjects_since("0" * 40) == []


def subjects_since(commit: str, folder: Path = ROOT) -> list[str]:
    """Subjects of all commits after this one; none where git, or the commit, is not there."""
    if not (folder / ".git").exists():
        return []
    try:
        done = subprocess.run(
            ["git", "log", "--format=%s", f"{commit}..HEAD"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
