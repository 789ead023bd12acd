{{/*
Permissions of the operator, each rule with its reason. tests/unit/chart/golden/rbac.yaml repeats
them, so that no permission is added or removed unnoticed.
*/}}

{{/*
In all namespaces, unless watchNamespaces is set: ElasticJobs, whose status names the reason if their
namespace is not served, events about them, and the pods to watch.
*/}}
{{- define "elasticjob.rules.watched" -}}
# The jobs; deleted at the end of their time to live. `patch` writes spec.nodes where a user leaves it open.
- apiGroups: [elasticjob.dev]
  resources: [elasticjobs]
  verbs: [get, list, watch, patch, delete]
- apiGroups: [elasticjob.dev]
  resources: [elasticjobs/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}

{{/* In the namespaces that are served. */}}
{{- define "elasticjob.rules.jobs" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [get, create, delete]
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
{{- end }}

{{/*
Of the binder, cluster-wide: it gives the operator access to namespaces, and to nothing else. `bind`
lets it bind this ClusterRole alone; create cannot be limited by name.
*/}}
{{- define "elasticjob.rules.binder" -}}
- apiGroups: [""]
  resources: [namespaces]
  verbs: [list, watch]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [clusterroles]
  resourceNames: [{{ include "elasticjob.jobsRole" . }}]
  verbs: [get, bind]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings]
  verbs: [create]
# list with a field selector for this name.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings]
  resourceNames: [{{ include "elasticjob.jobsRole" . }}]
  verbs: [get, list, delete]
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

{{/* In the release's namespace: the Secrets with etcd's certificates and with the authority's key. create cannot be limited by name. */}}
{{- define "elasticjob.rules.certificates" -}}
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [{{ include "elasticjob.etcd.secretName" . | quote }}, {{ include "elasticjob.etcd.secretName" . }}-authority]
  verbs: [get, patch]
{{- if include "elasticjob.certificates.restarts" . }}
# To restart members one by one, so that they trust a new authority.
- apiGroups: [apps]
  resources: [statefulsets]
  resourceNames: [{{ include "elasticjob.etcd.name" . }}]
  verbs: [get, patch]
{{- end }}
{{- end }}
