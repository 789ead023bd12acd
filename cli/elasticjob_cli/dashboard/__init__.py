"""Read-only web page of jobs: rendering, sources of jobs, and the HTTP server."""
