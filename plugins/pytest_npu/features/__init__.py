"""What an option switches on: one plugin object each."""
