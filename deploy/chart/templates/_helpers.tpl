{{- /* An image's whole name, of (dict "root" $ "image" <one of the values>). */ -}}
{{- define "oxide.image" -}}
{{- $registry := .root.Values.imageRegistry | default .image.registry | trimSuffix "/" -}}
{{- $name := ternary .image.repository (printf "%s/%s" $registry .image.repository) (empty $registry) -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "oxide.labels" -}}
app.kubernetes.io/name: oxide-csi-driver
{{- end -}}

{{- define "oxide.secretName" -}}
{{- .Values.secret.existing | default "oxide-secret" -}}
{{- end -}}

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

{{- /* "true" when what needs the snapshot CRDs is to be installed. */ -}}
{{- define "oxide.snapshots" -}}
{{- if eq (toString .Values.snapshots.enabled) "auto" -}}
{{- .Capabilities.APIVersions.Has "snapshot.storage.k8s.io/v1" -}}
{{- else -}}
{{- .Values.snapshots.enabled -}}
{{- end -}}
{{- end -}}

{{- /* What an unprivileged container of a sidecar may do: nothing but its work. */ -}}
{{- define "oxide.locked" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* The driver's variables that controller and nodes share. */ -}}
{{- define "oxide.env" -}}
- name: CSI_ENDPOINT
  value: unix:///csi/csi.sock
- name: OXIDE_MAX_DISKS
  value: {{ .Values.maxDisks | quote }}
- name: OXIDE_LOG_LEVEL
  value: {{ .Values.log.level }}
- name: OXIDE_LOG_FORMAT
  value: {{ .Values.log.format }}
{{- end -}}

{{- /* How kubelet learns that a driver is stuck: the livenessprobe container asks it. */ -}}
{{- define "oxide.probes" -}}
# kubelet asks the liveness-probe container, which calls the driver's Probe.
startupProbe:
  httpGet:
    path: /healthz
    port: 9808
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet:
    path: /healthz
    port: 9808
  periodSeconds: {{ .Values.livenessProbe.periodSeconds }}
  timeoutSeconds: 5
  failureThreshold: {{ .Values.livenessProbe.failureThreshold }}
{{- end -}}

{{- define "oxide.probeArgs" -}}
- --csi-address=/csi/csi.sock
- --http-endpoint=:9808
- --probe-timeout={{ .Values.livenessProbe.timeout }}
- --v={{ .Values.log.sidecars }}
{{- end -}}

{{- /* What the sidecars of the controller have in common, of (dict "root" $ "sidecar" <values>). */ -}}
{{- define "oxide.sidecarArgs" -}}
- --csi-address=/csi/csi.sock
- --leader-election=true
- --timeout={{ .sidecar.timeout }}
- --worker-threads={{ .sidecar.workerThreads }}
- --retry-interval-max={{ .sidecar.retryIntervalMax }}
- --kube-api-qps={{ .root.Values.kubeApi.qps }}
- --kube-api-burst={{ .root.Values.kubeApi.burst }}
- --v={{ .root.Values.log.sidecars }}
{{- end -}}

{{- define "oxide.sidecarMounts" -}}
- name: socket-dir
  mountPath: /csi
- name: kube-api-access
  mountPath: /var/run/secrets/kubernetes.io/serviceaccount
  readOnly: true
{{- end -}}

{{- /* A token of the pod's service account, for the containers that mount it and for no other. */ -}}
{{- define "oxide.kubeApiAccess" -}}
- name: kube-api-access
  projected:
    defaultMode: 0444
    sources:
      - serviceAccountToken:
          path: token
          expirationSeconds: 3600
      - configMap:
          name: kube-root-ca.crt
          items:
            - key: ca.crt
              path: ca.crt
      - downwardAPI:
          items:
            - path: namespace
              fieldRef:
                fieldPath: metadata.namespace
{{- end -}}

{{- /* A StorageClass, of (dict "class" <values>). */ -}}
{{- define "oxide.storageClass" -}}
kind: StorageClass
apiVersion: storage.k8s.io/v1
metadata:
  name: {{ .class.name }}
  labels:
    {{- include "oxide.labels" . | nindent 4 }}
  {{- $annotations := .class.annotations | default dict }}
  {{- if .class.default }}
  {{- $annotations = merge (dict "storageclass.kubernetes.io/is-default-class" "true") $annotations }}
  {{- end }}
  {{- with $annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
provisioner: csi.oxide.computer
# Oxide's disks have a fixed size.
allowVolumeExpansion: false
reclaimPolicy: {{ .class.reclaimPolicy | default "Delete" }}
volumeBindingMode: {{ .class.volumeBindingMode | default "WaitForFirstConsumer" }}
{{- with .class.parameters }}
parameters:
  {{- range $key, $value := . }}
  {{ $key }}: {{ $value | quote }}
  {{- end }}
{{- end }}
{{- with .class.mountOptions }}
mountOptions:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
