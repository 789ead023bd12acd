"""ElasticJob controller: the API object, the planner, and the I/O that applies its plans."""
