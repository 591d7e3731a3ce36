"""Optional plugins beside this one: pytest-benchmark, xdist, html, syrupy, rerunfailures."""
