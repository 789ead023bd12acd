{{/* Names and labels. At most 40 characters, so that every suffix and a pod's ordinal fit. */}}
{{- define "elasticjob.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | regexFind "^.*[A-Za-z0-9]" }}
{{- end }}

{{- define "elasticjob.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- $name := include "elasticjob.name" . }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "elasticjob.operator.name" -}}{{ include "elasticjob.fullname" . }}-operator{{- end }}
{{- define "elasticjob.etcd.name" -}}{{ include "elasticjob.fullname" . }}-etcd{{- end }}
{{- define "elasticjob.etcd.headless" -}}{{ include "elasticjob.etcd.name" . }}-members{{- end }}
{{- define "elasticjob.certificates.name" -}}{{ include "elasticjob.fullname" . }}-certificates{{- end }}

{{- define "elasticjob.dashboard.name" -}}{{ include "elasticjob.fullname" . }}-dashboard{{- end }}
{{- define "elasticjob.binder.name" -}}{{ include "elasticjob.fullname" . }}-binder{{- end }}

{{/* ClusterRole of the operator in the namespaces of jobs, and name of the bindings to it. */}}
{{- define "elasticjob.jobsRole" -}}{{ .Release.Namespace }}-{{ include "elasticjob.operator.name" . }}-jobs{{- end }}

{{/* Namespaces, as a JSON list, that no ElasticJob may use unless watchNamespaces names them. */}}
{{- define "elasticjob.closedNamespaces" -}}
{{- $closed := list }}
{{- range $namespace := list "kube-system" .Release.Namespace | uniq }}
{{- if not (has $namespace $.Values.watchNamespaces) }}
{{- $closed = append $closed $namespace }}
{{- end }}
{{- end }}
{{- toJson $closed }}
{{- end }}

{{/* Label selector of the served namespaces: key=value,…; empty: all. */}}
{{- define "elasticjob.namespaceSelector" -}}
{{- $labels := list }}
{{- range $key, $value := .Values.watchNamespaceSelector }}
{{- $labels = append $labels (printf "%s=%s" $key $value) }}
{{- end }}
{{- join "," $labels }}
{{- end }}

{{- define "elasticjob.serviceAccountName" -}}
{{- .Values.operator.serviceAccount.name | default (include "elasticjob.operator.name" .) }}
{{- end }}

{{/* Labels of a component: (list $ "operator"). */}}
{{- define "elasticjob.selectorLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "elasticjob.name" $root | quote }}
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 | quote }}
{{- end }}

{{/* Labels of a pod, without a version: a new chart version alone must not restart etcd. */}}
{{- define "elasticjob.podLabels" -}}
{{- $selected := include "elasticjob.selectorLabels" . | fromYaml }}
{{- $part := dict "app.kubernetes.io/part-of" "elasticjob" }}
{{- include "elasticjob.merged" (list $part (index . 0).Values.commonLabels $selected) }}
{{- end }}

{{- define "elasticjob.labels" -}}
{{- $root := index . 0 }}
{{- $chart := dict
  "app.kubernetes.io/version" $root.Chart.AppVersion
  "app.kubernetes.io/managed-by" $root.Release.Service
  "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_") }}
{{- include "elasticjob.merged" (list (include "elasticjob.podLabels" . | fromYaml) $chart) }}
{{- end }}

{{/* Labels of several maps, each key once: the last value counts. */}}
{{- define "elasticjob.merged" -}}
{{- $merged := dict }}
{{- range . }}
{{- range $key, $value := . }}
{{- $_ := set $merged $key $value }}
{{- end }}
{{- end }}
{{- toYaml $merged }}
{{- end }}

{{/* Reference of an image: (list $ $image); its tag defaults to the chart's appVersion. */}}
{{- define "elasticjob.image" -}}
{{- $root := index . 0 }}{{ $image := index . 1 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default $root.Chart.AppVersion }}
{{- end }}
{{- end }}

{{/* "true" if each job gets a NetworkPolicy of its own, else empty. */}}
{{- define "elasticjob.jobPolicies" -}}
{{- if and .Values.networkPolicy.enabled .Values.networkPolicy.jobs }}true{{ end }}
{{- end }}
