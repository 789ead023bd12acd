{{/*
What the operator may do, each rule with its reason. tests/unit/chart/golden/rbac.yaml has the same
once more, so that no right comes or goes unnoticed.
*/}}

{{/* In the namespaces of jobs. */}}
{{- define "elasticjob.rules.jobs" -}}
# The jobs; deleted when their time to live is over.
- apiGroups: [elasticjob.dev]
  resources: [elasticjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [elasticjob.dev]
  resources: [elasticjobs/status]
  verbs: [patch]
# An absent spec.nodes is written once.
- apiGroups: [elasticjob.dev]
  resources: [elasticjobs/scale]
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
# By name alone: neither list nor watch, so it never sees the Secrets of others.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}

{{/* Of the cluster: which nodes are not ready, cordoned or tainted, and which cluster it is. */}}
{{- define "elasticjob.rules.nodes" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
# Its uid is the cluster's identity: an etcd serves one cluster alone.
- apiGroups: [""]
  resources: [namespaces]
  resourceNames: [kube-system]
  verbs: [get]
{{- end }}

{{/* In the release's namespace: the Lease of the active replica. create knows no names. */}}
{{- define "elasticjob.rules.lease" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "elasticjob.operator.name" . }}]
  verbs: [get, patch]
{{- end }}

{{/* In the release's namespace: the Secret with etcd's certificates. create knows no names. */}}
{{- define "elasticjob.rules.certificates" -}}
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [{{ include "elasticjob.etcd.secretName" . }}]
  verbs: [get, patch]
{{- if include "elasticjob.certificates.restarts" . }}
# Members are restarted, one by one, to learn of a new authority.
- apiGroups: [apps]
  resources: [statefulsets]
  resourceNames: [{{ include "elasticjob.etcd.name" . }}]
  verbs: [get, patch]
{{- end }}
{{- end }}
