"""pytest plugin: device, lock, phases, watchdog and reports for LLM deployments on AMD NPUs."""
