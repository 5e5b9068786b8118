{{- /* A container without privileges, of (dict "root" $ "name" NAME "of" KEY "args" TEXT "env" TEXT
"mounts" TEXT "values" VALUES "port" NAME). KEY names its values, its resources and its port; env, args, values
and port may be missing. */ -}}
{{- define "oxide.sidecar" -}}
{{- $values := .values | default (index .root.Values .of) -}}
- name: {{ .name }}
  image: {{ include "oxide.image" (dict "root" .root "image" $values.image) }}
  imagePullPolicy: {{ .root.Values.imagePullPolicy }}
  {{- if or .args $values.extraArgs }}
  args:
    {{- with .args }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $values.extraArgs }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- if or .env $values.extraEnv }}
  env:
    {{- with .env }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- $port := index .root.Values.metrics (printf "%sPort" .of) }}
  {{- if and $port .root.Values.metrics.enabled }}
  ports:
    - name: {{ .port | default .of }}
      containerPort: {{ $port }}
  {{- end }}
  volumeMounts:
    {{- .mounts | nindent 4 }}
    {{- with $values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  terminationMessagePolicy: FallbackToLogsOnError
  securityContext:
    {{- include "oxide.locked" . | nindent 4 }}
  {{- with include "oxide.resources" (index .root.Values.resources .of) }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- /* A sidecar of the controller that calls Kubernetes, of (dict "root" $ "name" NAME "of" KEY). */ -}}
{{- define "oxide.controllerSidecar" -}}
{{- $args := printf "%s\n%s" (include "oxide.sidecarArgs" .) (include (printf "oxide.%sArgs" .of) .root) | trim }}
{{- $mounts := printf "- name: socket-dir\n  mountPath: /csi\n%s" (include "oxide.kubeApiMount" .) }}
{{- include "oxide.sidecar" (dict "root" .root "name" .name "of" .of "args" $args "mounts" $mounts) }}
{{- end -}}

{{- /* The arguments that all sidecars of the controller have. */ -}}
{{- define "oxide.sidecarArgs" -}}
{{- $values := index .root.Values .of -}}
- --csi-address=/csi/csi.sock
- --leader-election=true
# Longer than a call may take (timeout), and than the driver's changes follow their looks.
- --leader-election-lease-duration=45s
- --leader-election-renew-deadline=30s
- --timeout={{ $values.timeout }}
- --worker-threads={{ $values.workerThreads }}
- --retry-interval-max={{ $values.retryIntervalMax }}
- --kube-api-qps={{ .root.Values.kubeApi.qps }}
- --kube-api-burst={{ .root.Values.kubeApi.burst }}
- --v={{ .root.Values.log.sidecars }}
{{- if .root.Values.metrics.enabled }}
- --http-endpoint=:{{ index .root.Values.metrics (printf "%sPort" .of) }}
{{- end }}
{{- end -}}

{{- define "oxide.provisionerArgs" -}}
- --extra-create-metadata=true
- --default-fstype=ext4
{{- if .Values.topologyInstance }}
# CreateVolume gets the node that the scheduler chose, and no other.
- --strict-topology=true
{{- if not .Values.topology }}
# Where only the instance is known, a volume that no pod waits for can be anywhere.
- --immediate-topology=false
{{- end }}
{{- end }}
{{- end -}}

{{- define "oxide.attacherArgs" -}}
- --default-fstype=ext4
{{- end -}}

{{- define "oxide.snapshotterArgs" -}}
- --extra-create-metadata=true
{{- with .Values.snapshotter.featureGates }}
# A rack has no group snapshots; with the gate on, the sidecar waits for their CRDs.
- --feature-gates={{ range $i, $gate := keys . | sortAlpha }}{{ if $i }},{{ end }}{{ $gate }}={{ index $.Values.snapshotter.featureGates $gate }}{{ end }}
{{- end }}
{{- end -}}

{{- /* The container that checks whether the driver's process works, of (dict "root" $). */ -}}
{{- define "oxide.livenessProbe" -}}
{{- $mounts := "- name: liveness-dir\n  mountPath: /liveness" }}
{{- include "oxide.sidecar" (dict "root" .root "name" "liveness-probe" "of" "livenessProbe" "args" (include "oxide.probeArgs" .root) "mounts" $mounts) }}
{{- end -}}

{{- define "oxide.probeArgs" -}}
- --csi-address=/liveness/liveness.sock
- --http-endpoint=:9808
- --probe-timeout={{ .Values.livenessProbe.timeout }}
- --v={{ .Values.log.sidecars }}
{{- end -}}

{{- define "oxide.registrarArgs" -}}
- --csi-address=/csi/csi.sock
- --kubelet-registration-path={{ .Values.node.kubeletDir }}/plugins/csi.oxide.computer/csi.sock
- --http-endpoint=:9811
- --v={{ .Values.log.sidecars }}
{{- end -}}

{{- define "oxide.registrar" -}}
{{- include "oxide.sidecar" (dict "root" . "name" "node-driver-registrar" "of" "registrar" "args" (include "oxide.registrarArgs" .) "mounts" (include "oxide.registrarMounts" .)) }}
  # After a restart it registers again if its socket is gone.
  livenessProbe:
    httpGet:
      path: /healthz
      port: 9811
    periodSeconds: 30
    timeoutSeconds: 5
{{- end -}}

{{- define "oxide.registrarMounts" -}}
- name: plugin-dir
  mountPath: /csi
- name: registration-dir
  mountPath: /registration
{{- end -}}

{{- define "oxide.metadataEnv" -}}
- name: K8S_NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
{{- end -}}

{{- define "oxide.metadataMounts" -}}
- name: oxide-instance-metadata
  mountPath: /data
# The only container of the pod with a token.
{{ include "oxide.kubeApiMount" . }}
{{- end -}}
