"""Training jobs of `examples/` under ElasticJob and under torchrun, for `bench.frameworks`."""
