"""Access to the API server: client, errors, event recorder."""
