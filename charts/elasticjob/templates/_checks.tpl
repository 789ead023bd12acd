{{/*
Checks that the schema cannot express, of several values or of installed objects.
*/}}
{{- define "elasticjob.checks" -}}
{{- $fullname := include "elasticjob.fullname" . }}
{{- /* Newer API servers accept names that begin with a digit: an installed release keeps its names.
`helm template`, which reads no cluster, learns of the release by --is-upgrade. */}}
{{- $label := regexMatch "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$" $fullname }}
{{- $service := include "elasticjob.operator.name" . }}
{{- if not (and $label (or (regexMatch "^[a-z]" $fullname) .Release.IsUpgrade (lookup "v1" "Service" .Release.Namespace $service))) }}
{{- fail (printf "fullnameOverride must be another prefix than %s: names of Services must be DNS labels that begin with a letter; for an installed release that begins with a digit, pass --is-upgrade to helm template" $fullname) }}
{{- end }}
{{- range $component, $labels := dict "" .Values.commonLabels "operator" .Values.operator.podLabels "etcd" .Values.etcd.podLabels }}
{{- range $key, $own := include "elasticjob.selectorLabels" (list $ $component) | fromYaml }}
{{- $given := get ($labels | default dict) $key }}
{{- if and (hasKey ($labels | default dict) $key) (ne $given $own) }}
{{- fail (printf "%s must not set %s to %s: the chart sets it, and selects its pods by it" (empty $component | ternary "commonLabels" (printf "%s.podLabels" $component)) $key $given) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.watchNamespaces .Values.watchNamespaceSelector }}
{{- fail "watchNamespaces and watchNamespaceSelector must not both be given: the first names the namespaces, the second selects them by label" }}
{{- end }}
{{- if .Values.etcd.enabled }}
{{- $version := regexFind "^v?[0-9]{1,2}\\.(0|[1-9][0-9]?)" .Values.etcd.image.tag | trimPrefix "v" }}
{{- if and $version (not .Values.etcd.image.digest) (semverCompare "<3.6" $version) }}
{{- fail (printf "etcd.image.tag must be 3.6.14, 3.7.1 or later of one of these lines, got %s: etcd before 3.6 does not always check the rights of a user" .Values.etcd.image.tag) }}
{{- end }}
{{- if and (eq (int .Values.etcd.members) 3) (not .Values.etcd.persistence.enabled) }}
{{- fail "etcd.persistence.enabled must be true with etcd.members 3: a member that comes back empty under its old name breaks the others" }}
{{- end }}
{{- if lt (int .Values.etcd.electionMilliseconds) (mul 5 (int .Values.etcd.heartbeatMilliseconds) | int) }}
{{- fail (printf "etcd.electionMilliseconds must be at least 5 times etcd.heartbeatMilliseconds, else etcd does not start; got %d and %d" (int .Values.etcd.electionMilliseconds) (int .Values.etcd.heartbeatMilliseconds)) }}
{{- end }}
{{- if and (eq .Values.etcd.tls.clientCertificates "Required") (not .Values.etcd.tls.enabled) }}
{{- fail "etcd.tls.enabled must be true with etcd.tls.clientCertificates Required" }}
{{- end }}
{{- $found := lookup "apps/v1" "StatefulSet" .Release.Namespace (include "elasticjob.etcd.name" .) }}
{{- if and $found (ne (int $found.spec.replicas) (int .Values.etcd.members)) }}
{{- fail (printf "etcd.members must stay %d, with which this release was installed: members are not added or removed by changing the value" (int $found.spec.replicas)) }}
{{- end }}
{{- else }}
{{- if not .Values.externalEtcd.endpoints }}
{{- fail "externalEtcd.endpoints must be given if etcd.enabled is false" }}
{{- end }}
{{- $keys := .Values.externalEtcd.secretKeys }}
{{- if and .Values.externalEtcd.secretName (ne (has "user" $keys) (has "password" $keys)) }}
{{- fail "externalEtcd.secretKeys must have both user and password, or neither" }}
{{- end }}
{{- if and .Values.externalEtcd.secretName (ne (has "tls.crt" $keys) (has "tls.key" $keys)) }}
{{- fail "externalEtcd.secretKeys must have both tls.crt and tls.key, or neither" }}
{{- end }}
{{- if and .Values.externalEtcd.secretName (ne (has "agents.crt" $keys) (has "agents.key" $keys)) }}
{{- fail "externalEtcd.secretKeys must have both agents.crt and agents.key, or neither" }}
{{- end }}
{{- end }}
{{- if and (not .Values.operator.serviceAccount.create) (not .Values.operator.serviceAccount.name) }}
{{- fail "operator.serviceAccount.name must be given if operator.serviceAccount.create is false" }}
{{- end }}
{{- end }}
