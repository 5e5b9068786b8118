{{- /* A container without privileges, of (dict "root" $ "name" NAME "of" KEY "args" TEXT "env" TEXT
"mounts" TEXT "values" VALUES "port" NAME). KEY names its values, its resources and its port; env, args, values
and port may be missing. */ -}}
{{- define "oxide.sidecar" -}}
{{- $values := .values | default (index .root.Values .of) -}}
- name: {{ .name | include "oxide.text" }}
  image: {{ include "oxide.image" (dict "root" .root "image" $values.image) | include "oxide.text" }}
  imagePullPolicy: {{ .root.Values.imagePullPolicy | include "oxide.text" }}
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
    - name: {{ .port | default .of | include "oxide.text" }}
      containerPort: {{ $port }}
  {{- end }}
  volumeMounts:
    {{- .mounts | nindent 4 }}
    {{- with $values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- /* If the driver is not ready, a sidecar logs the driver's reason and exits. With this policy
  kubectl describe shows the end of the log while kubelet waits before the restart. */}}
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
- {{ printf "--timeout=%v" $values.timeout | include "oxide.text" }}
- {{ printf "--worker-threads=%v" $values.workerThreads | include "oxide.text" }}
- {{ printf "--retry-interval-max=%v" $values.retryIntervalMax | include "oxide.text" }}
- {{ printf "--kube-api-qps=%v" .root.Values.kubeApi.qps | include "oxide.text" }}
- {{ printf "--kube-api-burst=%v" .root.Values.kubeApi.burst | include "oxide.text" }}
- {{ printf "--v=%v" .root.Values.log.sidecars | include "oxide.text" }}
{{- if .root.Values.metrics.enabled }}
- {{ printf "--http-endpoint=:%v" (index .root.Values.metrics (printf "%sPort" .of)) | include "oxide.text" }}
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
{{- $gates := list }}
{{- range $gate, $on := . }}
{{- $gates = append $gates (printf "%s=%t" $gate $on) }}
{{- end }}
- {{ printf "--feature-gates=%s" (join "," $gates) | include "oxide.text" }}
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
- {{ printf "--probe-timeout=%v" .Values.livenessProbe.timeout | include "oxide.text" }}
- {{ printf "--v=%v" .Values.log.sidecars | include "oxide.text" }}
{{- end -}}

{{- define "oxide.registrarArgs" -}}
- --csi-address=/csi/csi.sock
- {{ printf "--kubelet-registration-path=%v/plugins/csi.oxide.computer/csi.sock" .Values.node.kubeletDir | include "oxide.text" }}
- --http-endpoint=:9811
- {{ printf "--v=%v" .Values.log.sidecars | include "oxide.text" }}
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
