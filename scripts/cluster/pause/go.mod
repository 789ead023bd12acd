// The program that holds a pod's namespaces open, in the test cluster.
module elasticjob.dev/cluster/pause

go 1.26.0
