"""What fulfils the deployment contract: adapter, session, runner, command line of a model."""
