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
{{- if include "elasticjob.etcd.clientCertificates" . }}{{ $keys = concat $keys (list "operator.crt" "operator.key" "agents.crt" "agents.key") }}{{ end }}
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

{{/* "true" if the bundled etcd's clients get certificates of its authority, else empty. */}}
{{- define "elasticjob.etcd.clientCertificates" -}}
{{- if and .Values.etcd.enabled .Values.etcd.tls.enabled (or (not .Values.etcd.certificates.existingSecret) (eq .Values.etcd.tls.clientCertificates "Required")) -}}
true
{{- end }}
{{- end }}

{{/*
"true" if etcd refuses clients without a certificate, else empty. An etcd that is installed without
this stays so until the value is Required: agents of an earlier release have no certificate.
*/}}
{{- define "elasticjob.etcd.requiresCertificates" -}}
{{- if include "elasticjob.etcd.clientCertificates" . }}
{{- if eq .Values.etcd.tls.clientCertificates "Required" -}}
true
{{- else if eq .Values.etcd.tls.clientCertificates "Auto" }}
{{- $found := lookup "apps/v1" "StatefulSet" .Release.Namespace (include "elasticjob.etcd.name" .) }}
{{- if or (not $found) (has "--client-cert-auth" (index $found.spec.template.spec.containers 0).command) -}}
true
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Part of the variable that names a key's file: ETCD_CA for ca.crt. */}}
{{- define "elasticjob.etcd.variable" -}}
{{- get (dict "ca.crt" "ETCD_CA" "tls.crt" "ETCD_CERT" "tls.key" "ETCD_KEY" "operator.crt" "ETCD_CERT" "operator.key" "ETCD_KEY" "agents.crt" "AGENTS_CERT" "agents.key" "AGENTS_KEY" "user" "ETCD_USER" "password" "ETCD_PASSWORD") . }}
{{- end }}

{{/*
"true" if a member without data begins with authentication enabled, else empty. Its root has no known
password, so the operator's certificate must be root's: one that the chart issued.
*/}}
{{- define "elasticjob.etcd.authenticatedStart" -}}
{{- if and .Values.etcd.auth.enabled (include "elasticjob.certificates.made" .) (include "elasticjob.etcd.requiresCertificates" .) -}}
true
{{- end }}
{{- end }}

{{/*
Init containers that give a member without data those of an etcd with authentication:
(dict "root" $ "member" flags of the member).
*/}}
{{- define "elasticjob.etcd.initContainers" -}}
{{- $root := .root }}
- name: prepare-data
  {{- include "elasticjob.etcd.dataStep" $root | nindent 2 }}
  args: [prepare, --scratch=/initial]
  volumeMounts:
    - {name: initial, mountPath: /initial}
- name: restore-data
  image: {{ include "elasticjob.image" (list $root $root.Values.etcd.image) }}
  imagePullPolicy: {{ $root.Values.etcd.image.pullPolicy }}
  command:
    - etcdutl
    - snapshot
    - restore
    - /initial/authentication.db
    # The file is a database, to which `etcdctl snapshot save` would have added a hash.
    - --skip-hash-check
    - --data-dir=/initial/data
    {{- toYaml .member | nindent 4 }}
  {{- include "elasticjob.etcd.initContext" $root | nindent 2 }}
  volumeMounts:
    - {name: initial, mountPath: /initial}
- name: install-data
  {{- include "elasticjob.etcd.dataStep" $root | nindent 2 }}
  args:
    - install
    - --scratch=/initial
    - --data-dir=/var/lib/etcd/data
    - --tls=/etc/etcd/tls
    {{- range .member }}
    {{- if or (hasPrefix "--name=" .) (hasPrefix "--initial-cluster=" .) }}
    - {{ . }}
    {{- end }}
    {{- end }}
  volumeMounts:
    - {name: initial, mountPath: /initial}
    - {name: data, mountPath: /var/lib/etcd}
    - {name: tls, mountPath: /etc/etcd/tls, readOnly: true}
{{- end }}

{{/* Image and command of a step of the operator's image. */}}
{{- define "elasticjob.etcd.dataStep" -}}
image: {{ include "elasticjob.image" (list . .Values.operator.image) }}
imagePullPolicy: {{ .Values.operator.image.pullPolicy }}
command: [python, -m, elasticjob_operator, etcd-data]
{{ include "elasticjob.etcd.initContext" . }}
{{- end }}

{{- define "elasticjob.etcd.initContext" -}}
env:
  - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
resources:
  requests: {cpu: 50m, memory: 64Mi}
  limits: {memory: 256Mi}
securityContext:
  {{- include "elasticjob.containerSecurityContext" . | nindent 2 }}
{{- end }}
