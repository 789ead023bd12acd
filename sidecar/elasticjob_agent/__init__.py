"""Worker agent: joins the job's rendezvous and runs the workers of one node."""
