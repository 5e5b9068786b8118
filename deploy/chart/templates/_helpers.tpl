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

{{- /* What the names of the objects begin with. */ -}}
{{- define "oxide.fullname" -}}
{{- .Values.fullnameOverride | default "oxide-csi" -}}
{{- end -}}

{{- /* The label by which pods are found; selectors cannot change, so it is all that they have beside app. */ -}}
{{- define "oxide.selector" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default "oxide-csi-driver" }}
{{- end -}}

{{- /* The labels of every object. */ -}}
{{- define "oxide.labels" -}}
{{- include "oxide.selector" . -}}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end -}}
{{- end -}}

{{- define "oxide.secretName" -}}
{{- .Values.secret.existing | default "oxide-secret" -}}
{{- end -}}

{{- /* What the driver declares of its topology, as variables of controller and nodes: of (dict "root" $
"topology" TEXT). */ -}}
{{- define "oxide.topologyEnv" -}}
{{- with .topology }}
- name: OXIDE_TOPOLOGY
  value: {{ . | quote }}
{{- end }}
{{- if .root.Values.topologyInstance }}
- name: OXIDE_TOPOLOGY_INSTANCE
  value: "true"
{{- end }}
{{- end -}}

{{- /* "true" when the provisioner asks where nodes are; otherwise empty. */ -}}
{{- define "oxide.topology" -}}
{{- if or .Values.topology .Values.topologyInstance }}true{{ end -}}
{{- end -}}

{{- /* "true" when what needs the snapshot CRDs is to be installed. */ -}}
{{- define "oxide.snapshots" -}}
{{- if eq (toString .Values.snapshots.enabled) "auto" -}}
{{- .Capabilities.APIVersions.Has "snapshot.storage.k8s.io/v1" -}}
{{- else -}}
{{- .Values.snapshots.enabled -}}
{{- end -}}
{{- end -}}

{{- /* A StorageClass, of (dict "root" $ "class" <values>). */ -}}
{{- define "oxide.storageClass" -}}
kind: StorageClass
apiVersion: storage.k8s.io/v1
metadata:
  name: {{ .class.name }}
  labels:
    {{- include "oxide.labels" .root | nindent 4 }}
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

{{- /* Where the replicas of the controller run: controller.affinity and the anti-affinity. */ -}}
{{- define "oxide.controllerAffinity" -}}
{{- with .Values.controller.affinity }}
{{ toYaml . }}
{{- end }}
{{- if eq .Values.controller.antiAffinity "required" }}
podAntiAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: kubernetes.io/hostname
      labelSelector:
        matchLabels:
          app: oxide-csi-controller
{{- else if eq .Values.controller.antiAffinity "preferred" }}
podAntiAffinity:
  preferredDuringSchedulingIgnoredDuringExecution:
    - weight: 100
      podAffinityTerm:
        topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            app: oxide-csi-controller
{{- end }}
{{- end -}}
