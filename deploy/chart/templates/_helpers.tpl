{{- /* A text as a scalar of YAML in one line, quoted if it would otherwise be anything else. */ -}}
{{- define "oxide.text" -}}
{{- if regexMatch "[[:space:]]" . }}{{ toJson . }}{{ else }}{{ toYaml . }}{{ end }}
{{- end -}}

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
app.kubernetes.io/name: {{ .Values.nameOverride | default "oxide-csi-driver" | include "oxide.text" }}
{{- end -}}

{{- /* The labels and annotations of an object, of (dict "root" $ "labels" MAP "annotations" MAP). Both maps may be
missing. They win over the common ones, and the label of the selector wins over all. */ -}}
{{- define "oxide.meta" -}}
labels:
  {{- mergeOverwrite dict (.root.Values.commonLabels | default dict) (.labels | default dict) (include "oxide.selector" .root | fromYaml) | toYaml | nindent 2 }}
{{- with mergeOverwrite dict (.root.Values.commonAnnotations | default dict) (.annotations | default dict) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* The name of a pod's service account, of (dict "root" $ "of" KEY). KEY has the pod's values. */ -}}
{{- define "oxide.account" -}}
{{- (index .root.Values .of).serviceAccountName | default (printf "%s-%s" (include "oxide.fullname" .root) (kebabcase .of)) -}}
{{- end -}}

{{- /* The service account of a pod, of (dict "root" $ "of" KEY). */ -}}
{{- define "oxide.serviceAccount" -}}
{{- if .root.Values.serviceAccount.create -}}
kind: ServiceAccount
apiVersion: v1
metadata:
  name: {{ include "oxide.account" . | include "oxide.text" }}
  namespace: {{ .root.Release.Namespace | include "oxide.text" }}
  {{- include "oxide.meta" (dict "root" .root "annotations" (index .root.Values .of).serviceAccountAnnotations) | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* The binding of a role to a pod's service account, of (dict "root" $ "of" KEY "kind" KIND "name" NAME). The
role, a Role or a ClusterRole, has the same name. */ -}}
{{- define "oxide.binding" -}}
kind: {{ .kind }}Binding
apiVersion: rbac.authorization.k8s.io/v1
metadata:
  name: {{ .name | include "oxide.text" }}
  {{- if eq .kind "Role" }}
  namespace: {{ .root.Release.Namespace | include "oxide.text" }}
  {{- end }}
  {{- include "oxide.meta" (dict "root" .root) | nindent 2 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ .kind }}
  name: {{ .name | include "oxide.text" }}
subjects:
  - kind: ServiceAccount
    name: {{ include "oxide.account" . | include "oxide.text" }}
    namespace: {{ .root.Release.Namespace | include "oxide.text" }}
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
  name: {{ .class.name | include "oxide.text" }}
  {{- $default := dict "storageclass.kubernetes.io/is-default-class" "true" }}
  {{- $annotations := merge dict (ternary $default dict (.class.default | default false)) (.class.annotations | default dict) }}
  {{- include "oxide.meta" (dict "root" .root "labels" .class.labels "annotations" $annotations) | nindent 2 }}
provisioner: csi.oxide.computer
# Oxide's disks have a fixed size.
allowVolumeExpansion: false
reclaimPolicy: {{ .class.reclaimPolicy | default "Delete" | include "oxide.text" }}
volumeBindingMode: {{ .class.volumeBindingMode | default "WaitForFirstConsumer" | include "oxide.text" }}
{{- with .class.parameters }}
parameters:
  {{- range $key, $value := . }}
  {{ $key | include "oxide.text" }}: {{ $value | quote }}
  {{- end }}
{{- end }}
{{- with .class.mountOptions }}
mountOptions:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .class.allowedTopologies }}
allowedTopologies:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* A VolumeSnapshotClass, of (dict "root" $ "class" <values>). */ -}}
{{- define "oxide.snapshotClass" -}}
kind: VolumeSnapshotClass
apiVersion: snapshot.storage.k8s.io/v1
metadata:
  name: {{ .class.name | include "oxide.text" }}
  {{- $default := dict "snapshot.storage.kubernetes.io/is-default-class" "true" }}
  {{- $annotations := merge dict (ternary $default dict (.class.default | default false)) (.class.annotations | default dict) }}
  {{- include "oxide.meta" (dict "root" .root "labels" .class.labels "annotations" $annotations) | nindent 2 }}
driver: csi.oxide.computer
deletionPolicy: {{ .class.deletionPolicy | default "Delete" | include "oxide.text" }}
{{- with .class.parameters }}
parameters:
  {{- range $key, $value := . }}
  {{ $key | include "oxide.text" }}: {{ $value | quote }}
  {{- end }}
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
