"""Systems that ElasticJob is measured against, and the worker that all of them run."""
