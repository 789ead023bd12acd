"""From other operators' jobs to ElasticJobs: values in, values and remarks out. No I/O."""
