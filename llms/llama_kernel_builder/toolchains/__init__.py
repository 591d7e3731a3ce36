"""What turns a program into an artefact that the driver loads."""
