{{/* Common parts of every pod of the chart. */}}

{{/* Security context of a pod: restricted, merged with the values' fields; null removes a field. */}}
{{- define "elasticjob.podSecurityContext" -}}
{{- $restricted := dict "runAsNonRoot" true "seccompProfile" (dict "type" "RuntimeDefault") }}
{{- $merged := mergeOverwrite $restricted (deepCopy .) }}
{{- range $key, $value := $merged }}
{{- if not (kindIs "invalid" $value) }}
{{ $key }}: {{ toJson $value }}
{{- end }}
{{- end }}
{{- end }}

{{- define "elasticjob.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Scheduling constraints of a component's pods: (list $ $values "component"). */}}
{{- define "elasticjob.scheduling" -}}
{{- $root := index . 0 }}{{ $values := index . 1 }}{{ $component := index . 2 }}
{{- with $values.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $values.topologySpreadConstraints }}
{{- $labels := include "elasticjob.selectorLabels" (list $root $component) | fromYaml }}
topologySpreadConstraints:
  {{- range . }}
  - {{ mergeOverwrite (dict "labelSelector" (dict "matchLabels" $labels)) . | toJson }}
  {{- end }}
{{- end }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- end }}

{{/* Anti-affinity of a component's pods by node: (list $ "component" "preferred|required"). */}}
{{- define "elasticjob.antiAffinity" -}}
{{- $root := index . 0 }}{{ $component := index . 1 }}
{{- $labels := include "elasticjob.selectorLabels" (list $root $component) | fromYaml }}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" $labels) }}
podAntiAffinity:
  {{- if eq (index . 2) "required" }}
  requiredDuringSchedulingIgnoredDuringExecution:
    - {{ toJson $term }}
  {{- else }}
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm: {{ toJson $term }}
  {{- end }}
{{- end }}
