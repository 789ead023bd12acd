"""The ElasticJob controller: the API object, the plan, and the edges that carry it out."""
