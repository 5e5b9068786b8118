{{- /* Where the cluster's id comes from: "is ID", or from the Secret's key: "secret", "nothing" (there is no
key, and this release has always run without an id), "unasked" (Helm asked no cluster). What this release has
used stays, because the id is part of the ownership tag of every disk: an upgrade never changes it. */ -}}
{{- define "oxide.clusterId" -}}
{{- $secret := lookup "v1" "Secret" .Release.Namespace (include "oxide.secretName" .) -}}
{{- $inSecret := hasKey ($secret.data | default dict) .Values.secret.keys.clusterId -}}
{{- $system := lookup "v1" "Namespace" "" "kube-system" -}}
{{- $used := include "oxide.usedClusterId" . -}}
{{- if .Values.clusterId -}}
is {{ .Values.clusterId }}
{{- else if hasPrefix "is " $used -}}
{{- $used -}}
{{- else if $inSecret -}}
secret
{{- else if $used -}}
{{- $used -}}
{{- else if $system -}}
is {{ $system.metadata.uid }}
{{- else -}}
unasked
{{- end -}}
{{- end -}}

{{- /* What the controller in the cluster has: "is ID", "nothing" (an optional key of the Secret), or "". */ -}}
{{- define "oxide.usedClusterId" -}}
{{- $deployment := lookup "apps/v1" "Deployment" .Release.Namespace "oxide-csi-controller" -}}
{{- if $deployment -}}
{{- range $deployment.spec.template.spec.containers -}}
{{- range .env -}}
{{- if and (eq .name "OXIDE_CLUSTER_ID") .value -}}
is {{ .value }}
{{- else if and (eq .name "OXIDE_CLUSTER_ID") .valueFrom.secretKeyRef.optional -}}
nothing
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
