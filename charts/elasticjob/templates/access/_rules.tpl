{{/*
Permissions of the operator, each rule with its reason. tests/unit/chart/golden/rbac.yaml repeats
them, so that no permission is added or removed unnoticed.
*/}}

{{/* In the namespaces of jobs. */}}
{{- define "elasticjob.rules.jobs" -}}
# The jobs; deleted at the end of their time to live. `patch` writes spec.nodes where a user leaves it open.
- apiGroups: [elasticjob.dev]
  resources: [elasticjobs]
  verbs: [get, list, watch, patch, delete]
- apiGroups: [elasticjob.dev]
  resources: [elasticjobs/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, create]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create, patch, delete]
{{- if include "elasticjob.jobPolicies" . }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create, patch]
{{- end }}
# By name only, without list and watch, so that it never sees other Secrets.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}

{{/* Cluster-wide: the nodes' readiness, cordons and taints, and the cluster's identity. */}}
{{- define "elasticjob.rules.nodes" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
# Its uid is the cluster's identity: an etcd serves only one cluster.
- apiGroups: [""]
  resources: [namespaces]
  resourceNames: [kube-system]
  verbs: [get]
{{- end }}

{{/* In the release's namespace: the Lease of the active replica. create cannot be limited by name. */}}
{{- define "elasticjob.rules.lease" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "elasticjob.operator.name" . }}]
  verbs: [get, patch]
{{- end }}

{{/* In the release's namespace: the Secret with etcd's certificates. create cannot be limited by name. */}}
{{- define "elasticjob.rules.certificates" -}}
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [{{ include "elasticjob.etcd.secretName" . }}]
  verbs: [get, patch]
{{- if include "elasticjob.certificates.restarts" . }}
# To restart members one by one, so that they trust a new authority.
- apiGroups: [apps]
  resources: [statefulsets]
  resourceNames: [{{ include "elasticjob.etcd.name" . }}]
  verbs: [get, patch]
{{- end }}
{{- end }}
