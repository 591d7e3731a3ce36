"""Model folders that tests copy before they run them: nothing of them is collected where it stands."""

collect_ignore_glob = ["scaffold_*"]
