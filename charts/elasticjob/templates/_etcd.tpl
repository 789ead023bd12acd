{{/* Where etcd is and what opens it, bundled or external. */}}

{{- define "elasticjob.etcd.scheme" -}}
{{- if .Values.etcd.tls.enabled }}https{{ else }}http{{ end }}
{{- end }}

{{/*
The endpoints, with commas between. Behind each stands a Service address that outlives its pod: a
client need not look a name up again, which takes gRPC half a minute. Of three members each has its
own, so that clients choose among them and a dead one costs them one attempt.
*/}}
{{- define "elasticjob.etcd.endpoints" -}}
{{- if not .Values.etcd.enabled }}
{{- join "," .Values.externalEtcd.endpoints }}
{{- else }}
{{- $scheme := include "elasticjob.etcd.scheme" . }}
{{- $endpoints := list }}
{{- range $service := include "elasticjob.etcd.clientServices" . | splitList "," }}
{{- $endpoints = append $endpoints (printf "%s://%s.%s.svc:2379" $scheme $service $.Release.Namespace) }}
{{- end }}
{{- join "," $endpoints }}
{{- end }}
{{- end }}

{{/* The Services that clients dial, with commas between. */}}
{{- define "elasticjob.etcd.clientServices" -}}
{{- $name := include "elasticjob.etcd.name" . }}
{{- if eq (int .Values.etcd.members) 1 }}
{{- $name }}
{{- else }}
{{- $services := list }}
{{- range $member := until (int .Values.etcd.members) }}
{{- $services = append $services (printf "%s-%d" $name $member) }}
{{- end }}
{{- join "," $services }}
{{- end }}
{{- end }}

{{/* Whether the chart makes certificates and root's password: "true", or nothing. */}}
{{- define "elasticjob.certificates.made" -}}
{{- if and .Values.etcd.enabled (not .Values.etcd.certificates.existingSecret) (or .Values.etcd.tls.enabled .Values.etcd.auth.enabled) -}}
true
{{- end }}
{{- end }}

{{/* The Secret with what opens etcd; empty where nothing is needed. */}}
{{- define "elasticjob.etcd.secretName" -}}
{{- if not .Values.etcd.enabled }}
{{- .Values.externalEtcd.secretName }}
{{- else if or .Values.etcd.tls.enabled .Values.etcd.auth.enabled }}
{{- .Values.etcd.certificates.existingSecret | default (include "elasticjob.etcd.name" .) }}
{{- end }}
{{- end }}

{{/* The keys of that Secret that the operator reads, with commas between. */}}
{{- define "elasticjob.etcd.operatorKeys" -}}
{{- $keys := list }}
{{- if not .Values.etcd.enabled }}
{{- if .Values.externalEtcd.secretName }}{{ $keys = .Values.externalEtcd.secretKeys }}{{ end }}
{{- else }}
{{- if .Values.etcd.tls.enabled }}{{ $keys = append $keys "ca.crt" }}{{ end }}
{{- if .Values.etcd.auth.enabled }}{{ $keys = concat $keys (list "user" "password") }}{{ end }}
{{- end }}
{{- join "," $keys }}
{{- end }}

{{/* Whether each job gets a user of its own: "true" or "false". */}}
{{- define "elasticjob.etcd.manageUsers" -}}
{{- if .Values.etcd.enabled }}{{ .Values.etcd.auth.enabled }}
{{- else }}{{ and .Values.externalEtcd.manageUsers (has "user" (include "elasticjob.etcd.operatorKeys" . | splitList ",")) }}
{{- end }}
{{- end }}

{{/* The variable that names a key's file: ca.crt is ELASTICJOB_ETCD_CA_FILE. */}}
{{- define "elasticjob.etcd.variable" -}}
{{- get (dict "ca.crt" "CA" "tls.crt" "CERT" "tls.key" "KEY" "user" "USER" "password" "PASSWORD") . }}
{{- end }}
