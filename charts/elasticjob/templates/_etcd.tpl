{{/* Endpoints and credentials of etcd, bundled or external. */}}

{{- define "elasticjob.etcd.scheme" -}}
{{- if .Values.etcd.tls.enabled }}https{{ else }}http{{ end }}
{{- end }}

{{/*
Comma-separated endpoints. Each is a Service address that outlives its pod, so that clients need not
resolve a name again, which takes gRPC half a minute. Each of three members has its own, so that
clients choose among them and a dead one costs them one attempt.
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

{{/* Comma-separated Services that clients connect to. */}}
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

{{/* "true" if the chart issues certificates and root's password, else empty. */}}
{{- define "elasticjob.certificates.made" -}}
{{- if and .Values.etcd.enabled (not .Values.etcd.certificates.existingSecret) (or .Values.etcd.tls.enabled .Values.etcd.auth.enabled) -}}
true
{{- end }}
{{- end }}

{{/* Name of the Secret with etcd's credentials; empty if none are needed. */}}
{{- define "elasticjob.etcd.secretName" -}}
{{- if not .Values.etcd.enabled }}
{{- .Values.externalEtcd.secretName }}
{{- else if or .Values.etcd.tls.enabled .Values.etcd.auth.enabled }}
{{- .Values.etcd.certificates.existingSecret | default (include "elasticjob.etcd.name" .) }}
{{- end }}
{{- end }}

{{/* Comma-separated keys of that Secret that the operator reads. */}}
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

{{/* "true" if each job gets its own user, else "false". */}}
{{- define "elasticjob.etcd.manageUsers" -}}
{{- if .Values.etcd.enabled }}{{ .Values.etcd.auth.enabled }}
{{- else }}{{ and .Values.externalEtcd.manageUsers (has "user" (include "elasticjob.etcd.operatorKeys" . | splitList ",")) }}
{{- end }}
{{- end }}

{{/* Variable that names a key's file: ELASTICJOB_ETCD_CA_FILE for ca.crt. */}}
{{- define "elasticjob.etcd.variable" -}}
{{- get (dict "ca.crt" "CA" "tls.crt" "CERT" "tls.key" "KEY" "user" "USER" "password" "PASSWORD") . }}
{{- end }}
