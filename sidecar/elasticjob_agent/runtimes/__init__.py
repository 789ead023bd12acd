"""Worker runtimes: a pod's launcher, a launcher below the agent, and forks of the agent."""
