{{- define "elasticjob.certificates.hook" -}}
helm.sh/hook: pre-install,pre-upgrade
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}

{{/*
"true" if members are restarted to trust a new authority, else empty. A single member that requires
no certificates of clients has nobody whose certificate it could refuse.
*/}}
{{- define "elasticjob.certificates.restarts" -}}
{{- if and .Values.etcd.tls.enabled (or (gt (int .Values.etcd.members) 1) (include "elasticjob.etcd.requiresCertificates" .)) }}true{{ end }}
{{- end }}

{{/* Retry policy of a Job: exit codes 2 and 3 mean that a retry does not help. */}}
{{- define "elasticjob.certificates.retries" -}}
backoffLimit: 4
activeDeadlineSeconds: 300
podFailurePolicy:
  rules:
    - action: FailJob
      onExitCodes: {containerName: certificates, operator: In, values: [2, 3]}
{{- end }}

{{/* Pod template that issues or renews certificates: (list $ "service account"). */}}
{{- define "elasticjob.certificates.pod" -}}
{{- $root := index . 0 }}{{ $account := index . 1 -}}
metadata:
  labels:
    {{- include "elasticjob.podLabels" (list $root "certificates") | nindent 4 }}
spec:
  restartPolicy: Never
  serviceAccountName: {{ $account }}
  enableServiceLinks: false
  securityContext:
    {{- include "elasticjob.podSecurityContext" $root.Values.operator.podSecurityContext | nindent 4 }}
  {{- include "elasticjob.scheduling" (list $root (omit $root.Values.operator "topologySpreadConstraints") "certificates") | nindent 2 }}
  containers:
    - name: certificates
      image: {{ include "elasticjob.image" (list $root $root.Values.operator.image) }}
      imagePullPolicy: {{ $root.Values.operator.image.pullPolicy }}
      command: [python, -m, elasticjob_operator, certs]
      args:
        - --namespace={{ $root.Release.Namespace }}
        - --secret={{ include "elasticjob.etcd.secretName" $root }}
        {{- $headless := include "elasticjob.etcd.headless" $root }}
        {{- range $service := concat (list (include "elasticjob.etcd.name" $root)) (include "elasticjob.etcd.clientServices" $root | splitList ",") | uniq }}
        - --dns-name={{ $service }}.{{ $root.Release.Namespace }}.svc
        {{- end }}
        - --dns-name=*.{{ $headless }}.{{ $root.Release.Namespace }}.svc
        {{- if include "elasticjob.certificates.restarts" $root }}
        - --statefulset={{ include "elasticjob.etcd.name" $root }}
        {{- end }}
      resources:
        requests: {cpu: 50m, memory: 128Mi}
        limits: {memory: 256Mi}
      securityContext:
        {{- include "elasticjob.containerSecurityContext" $root | nindent 8 }}
{{- end }}
