"""Gates that judge a deployment: they know no model and no device."""
