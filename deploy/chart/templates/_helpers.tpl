{{- /* An image's full name, of (dict "root" $ "image" <one of the values>). */ -}}
{{- define "oxide.image" -}}
{{- $registry := .root.Values.imageRegistry | default .image.registry | trimSuffix "/" -}}
{{- $name := ternary .image.repository (printf "%s/%s" $registry .image.repository) (empty $registry) -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (.image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- /* The prefix of the names of the objects. */ -}}
{{- define "oxide.fullname" -}}
{{- .Values.fullnameOverride | default "oxide-csi" -}}
{{- end -}}

{{- /* The label that selects pods. Selectors cannot change, so they contain only this label and app. */ -}}
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

{{- /* The variables of controller and nodes for the driver's topology, of (dict "root" $ "topology" TEXT). */ -}}
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

{{- /* "true" if the provisioner reads the topology of nodes; otherwise empty. */ -}}
{{- define "oxide.topology" -}}
{{- if or .Values.topology .Values.topologyInstance }}true{{ end -}}
{{- end -}}

{{- /* "true" if the objects that need the snapshot CRDs are to be installed. */ -}}
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

{{- /* The affinity of the controller: controller.affinity and the anti-affinity of its replicas. */ -}}
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
