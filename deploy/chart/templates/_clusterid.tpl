{{- /* The source of the cluster's id: "is ID", or the Secret's key: "secret", "nothing" (there is no key, and
this release has always run without an id), "unasked" (Helm asked no cluster). This release keeps the id that
it has used, because the id is part of the ownership tag of every disk. Only clusterId, or another Secret with
an id, changes it, and then NOTES.txt warns. */ -}}
{{- define "oxide.clusterId" -}}
{{- $inSecret := include "oxide.clusterIdOf" (dict "root" . "secret" (include "oxide.secretName" .) "key" .Values.secret.keys.clusterId) -}}
{{- $system := lookup "v1" "Namespace" "" "kube-system" -}}
{{- $used := include "oxide.usedClusterId" . -}}
{{- if .Values.clusterId -}}
is {{ .Values.clusterId }}
{{- else if hasPrefix "is " $used -}}
{{- $used -}}
{{- else if $inSecret -}}
secret
{{- else if hasPrefix "secret " $used -}}
is {{ trimPrefix "secret " $used }}
{{- else if $used -}}
{{- $used -}}
{{- else if $system -}}
is {{ $system.metadata.uid }}
{{- else -}}
unasked
{{- end -}}
{{- end -}}

{{- /* The cluster's id in a Secret, or "", of (dict "root" $ "secret" NAME "key" KEY). */ -}}
{{- define "oxide.clusterIdOf" -}}
{{- $secret := lookup "v1" "Secret" .root.Release.Namespace .secret -}}
{{- index ($secret.data | default dict) .key | default "" | b64dec | trim -}}
{{- end -}}

{{- /* The cluster's id of the controller in the cluster, whatever its name is: "is ID", "secret ID" (of its Secret),
"nothing" (an optional key that is not in its Secret), or "". */ -}}
{{- define "oxide.usedClusterId" -}}
{{- range (lookup "apps/v1" "Deployment" .Release.Namespace "").items -}}
{{- if eq (dig "spec" "template" "metadata" "labels" "app" "" .) "oxide-csi-controller" -}}
{{- range .spec.template.spec.containers -}}
{{- range ternary .env list (eq .name "oxide-plugin") -}}
{{- if eq .name "OXIDE_CLUSTER_ID" -}}
{{- $ref := dig "valueFrom" "secretKeyRef" dict . -}}
{{- if .value -}}
is {{ .value }}
{{- else if $ref -}}
{{- $inSecret := include "oxide.clusterIdOf" (dict "root" $ "secret" $ref.name "key" $ref.key) -}}
{{- if $inSecret -}}
secret {{ $inSecret }}
{{- else if $ref.optional -}}
nothing
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The warning that this upgrade changes the cluster's id, or nothing. */ -}}
{{- define "oxide.changedClusterId" -}}
{{- $used := include "oxide.usedClusterId" . -}}
{{- $id := include "oxide.clusterId" . -}}
{{- $before := regexReplaceAll "^(is |secret |nothing$)" $used "" -}}
{{- $after := regexReplaceAll "^(is |secret$|nothing$|unasked$)" $id "" -}}
{{- if eq $id "secret" -}}
{{- $after = include "oxide.clusterIdOf" (dict "root" . "secret" (include "oxide.secretName" .) "key" .Values.secret.keys.clusterId) -}}
{{- end -}}
{{- if and $used (ne $before $after) -}}
WARNING: this upgrade changes the cluster's id from {{ $before | default "none" }} to {{ $after }}. It is part of the ownership tag: the driver will not delete the disks and snapshots that were made until now (DiskNotOurs). If you did not mean to change it, undo the upgrade before you make more volumes:

  helm rollback {{ .Release.Name }} --namespace {{ .Release.Namespace }}
{{- end -}}
{{- end -}}
