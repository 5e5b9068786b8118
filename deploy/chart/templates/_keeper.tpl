{{- define "oxide.keeperArgs" -}}
{{- $k := .Values.nodeKeeper -}}
{{- with $k.coldAttach }}
{{- if .enabled -}}
- --cold-attach
{{- if .dryRun }}
- --dry-run
{{- end }}
- {{ printf "--settle=%v" .settle | include "oxide.text" }}
- {{ printf "--min-interval=%v" .minInterval | include "oxide.text" }}
- {{ printf "--stateful-set-interval=%v" .statefulSetInterval | include "oxide.text" }}
- {{ printf "--max-stops-per-volume=%v" (int .maxStopsPerVolume) | include "oxide.text" }}
- {{ printf "--max-stops-per-node=%v" (int .maxStopsPerNode) | include "oxide.text" }}
{{- if .window }}
- {{ printf "--window=%s" .window | quote }}
- {{ printf "--window-length=%v" .windowLength | include "oxide.text" }}
{{- end }}
- {{ printf "--drain-timeout=%v" .drainTimeout | include "oxide.text" }}
{{ end }}
{{- end }}
{{- if $k.startupTaint.enabled -}}
- --startup-taint
{{ end }}
{{- if $k.leavingNodes.enabled -}}
- --leaving-nodes
{{ if $k.leavingNodes.fence -}}
- --fence
{{ end }}
{{- end -}}
- {{ printf "--http-endpoint=:%v" .Values.metrics.nodeKeeperPort | include "oxide.text" }}
- {{ printf "--log-level=%v" .Values.log.level | include "oxide.text" }}
- {{ printf "--log-format=%v" .Values.log.format | include "oxide.text" }}
{{- end -}}

{{- define "oxide.keeperEnv" -}}
- name: K8S_NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
- name: K8S_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
{{ include "oxide.rackLogin" . }}
- name: OXIDE_PROJECT
  valueFrom:
    secretKeyRef:
      name: {{ include "oxide.secretName" . | include "oxide.text" }}
      key: {{ .Values.secret.keys.project | include "oxide.text" }}
{{ include "oxide.rackCA" . }}
{{- end -}}

{{- define "oxide.keeperMounts" -}}
- name: rack-access
  mountPath: /etc/oxide
  readOnly: true
{{ include "oxide.kubeApiMount" . }}
{{- end -}}

{{- /* "true" if a node's driver stays until the node's volumes are detached. */ -}}
{{- define "oxide.leave" -}}
{{- and .Values.nodeKeeper.enabled .Values.nodeKeeper.leavingNodes.enabled -}}
{{- end -}}

{{- /* The container of the node's pod that learns whether the node is leaving. It ends 60 seconds before the
grace period. If it is stuck, the driver's hook ends a little later. */ -}}
{{- define "oxide.leaveContainer" -}}
{{- $args := printf "- leave\n- --timeout=%ds" (sub .Values.nodeKeeper.leavingNodes.gracePeriodSeconds 60) }}
{{- $mounts := printf "- name: leaving\n  mountPath: /leaving\n%s" (include "oxide.kubeApiMount" . | replace "kube-api-access" "leave-api-access") }}
{{- include "oxide.sidecar" (dict "root" . "name" "leave" "of" "leave" "values" (dict "image" .Values.nodeKeeper.image) "args" $args "env" (include "oxide.metadataEnv" .) "mounts" $mounts) }}
{{- end -}}

{{- define "oxide.leaveVolumes" -}}
# The socket between the driver's hook and the container leave, which has a token of its own.
- name: leaving
  emptyDir: {}
{{ include "oxide.kubeApiAccess" . | replace "kube-api-access" "leave-api-access" }}
{{- end -}}

{{- define "oxide.problems.nodeKeeper" -}}
{{- $k := .Values.nodeKeeper }}
{{- if $k.enabled }}
{{- if lt (int $k.replicas) 1 }}
nodeKeeper.replicas is {{ $k.replicas }}: at least one keeper has to run, and two if it may stop every node.
{{- end }}
{{- if not (or $k.coldAttach.enabled $k.startupTaint.enabled $k.leavingNodes.enabled) }}
nodeKeeper.enabled is set and none of its duties is: set nodeKeeper.coldAttach.enabled, startupTaint.enabled or leavingNodes.enabled.
{{- end }}
{{- end }}
{{- if and $k.leavingNodes.fence (not $k.leavingNodes.enabled) }}
nodeKeeper.leavingNodes.fence is set and leavingNodes.enabled is not: fencing is part of that duty.
{{- end }}
{{- if lt (int $k.leavingNodes.gracePeriodSeconds) 120 }}
nodeKeeper.leavingNodes.gracePeriodSeconds is {{ $k.leavingNodes.gracePeriodSeconds }}: it has to be at least 120, of which the last 60 let a mkfs or repair finish.
{{- end }}
{{- if ($k.affinity | default dict).podAntiAffinity }}
nodeKeeper.affinity has a podAntiAffinity: the keeper has its own, one for each node; leave yours out.
{{- end }}
{{- range $name := list "settle" "minInterval" "statefulSetInterval" "windowLength" "drainTimeout" }}
{{- $value := index $k.coldAttach $name }}
{{- if not (regexMatch "^([0-9]+(\\.[0-9]+)?(ms|s|m|h))+$" $value) }}
nodeKeeper.coldAttach.{{ $name }} is {{ $value | quote }}: it has to be a duration such as 30s or 2m.
{{- end }}
{{- end }}
{{- with $k.coldAttach.window }}
{{- $names := "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec" }}
{{- $item := list }}
{{- range $value := list "[0-5]?[0-9]" "([01]?[0-9]|2[0-3])" "(0?[1-9]|[12][0-9]|3[01])" (printf "(0?[1-9]|1[0-2]|%s)" $names) "(0?[0-6]|sun|mon|tue|wed|thu|fri|sat)" }}
{{- $one := printf "([*?]|%s(-%s)?)(/[1-9][0-9]*)?" $value $value }}
{{- $item = append $item (printf "%s(,%s)*" $one $one) }}
{{- end }}
{{- if not (regexMatch (printf "(?i)^ *((CRON_)?TZ=[A-Za-z0-9/_+-]+ +)?%s *$" (join " +" $item)) .) }}
nodeKeeper.coldAttach.window is {{ . | quote }}: it has to be a cron expression of five fields, such as 0 2 * * 6 for Saturdays at two, with CRON_TZ=Europe/Zurich before it for another zone than UTC.
{{- end }}
{{- end }}
{{- $port := int .Values.metrics.nodeKeeperPort }}
{{- if or (lt $port 1) (gt $port 65535) }}
metrics.nodeKeeperPort is {{ $port }}: it has to be a port from 1 to 65535.
{{- end }}
{{- end -}}
