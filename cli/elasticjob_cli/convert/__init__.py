"""Conversion of other operators' jobs to ElasticJobs: returns values and remarks. No I/O."""
