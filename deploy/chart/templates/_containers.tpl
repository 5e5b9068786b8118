{{- /* The security context of a sidecar without privileges. */ -}}
{{- define "oxide.locked" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* The security context of a pod without privileges. */ -}}
{{- define "oxide.unprivileged" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- /* The labels of a pod, of (dict "root" $ "pod" NAME "of" KEY). KEY has its values; without it NAME has. */ -}}
{{- define "oxide.podLabels" -}}
app: oxide-csi-{{ .pod }}
{{ include "oxide.selector" .root }}
{{- with mergeOverwrite dict (.root.Values.commonLabels | default dict) ((index .root.Values (.of | default .pod)).podLabels | default dict) }}
{{ toYaml . }}
{{- end -}}
{{- end -}}

{{- /* A container's requests and limits; all may be null, for an autoscaler that sets them. */ -}}
{{- define "oxide.resources" -}}
{{- with . -}}
resources:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{- /* The driver's variables that controller and nodes share. */ -}}
{{- define "oxide.env" -}}
- name: CSI_ENDPOINT
  value: unix:///csi/csi.sock
# In a directory of its own: CSI allows nothing else beside its socket.
- name: OXIDE_LIVENESS_ENDPOINT
  value: unix:///liveness/liveness.sock
- name: OXIDE_MAX_DISKS
  value: {{ .Values.maxDisks | quote }}
- name: OXIDE_LOG_LEVEL
  value: {{ .Values.log.level | include "oxide.text" }}
- name: OXIDE_LOG_FORMAT
  value: {{ .Values.log.format | include "oxide.text" }}
{{- end -}}

{{- /* The annotations of a pod that calls the rack, of (dict "root" $ "of" KEY). */ -}}
{{- define "oxide.rackPodAnnotations" -}}
{{- with (index .root.Values .of).podAnnotations }}
{{- toYaml . }}
{{ end }}
{{- if .root.Values.secret.create -}}
# The driver reads these once, so the pods are replaced when they change; not for a new token.
csi.oxide.computer/settings: {{ list .root.Values.secret.host .root.Values.secret.project .root.Values.secret.caBundle | toJson | sha256sum }}
{{- end }}
{{- end -}}

{{- /* The tolerations of a pod, of (dict "root" $ "of" KEY). The pods that make a node ready tolerate the
startup taint. */ -}}
{{- define "oxide.tolerations" -}}
{{- $all := (index .root.Values .of).tolerations | default list }}
{{- $every := false }}
{{- range $all }}
{{- $every = or $every (and (eq (.operator | default "") "Exists") (empty .key) (empty .effect)) }}
{{- end }}
{{- $keeper := .root.Values.nodeKeeper }}
{{- if and $keeper.enabled $keeper.startupTaint.enabled (not $every) }}
{{- $all = append $all (dict "key" "csi.oxide.computer/agent-not-ready" "operator" "Exists") }}
{{- end }}
{{- with $all }}
{{- toYaml . }}
{{- end }}
{{- end -}}

{{- /* The variables with which a program connects to the rack. */ -}}
{{- define "oxide.rackLogin" -}}
# A key that is missing keeps the container from starting, with an event that names it.
- name: OXIDE_HOST
  valueFrom:
    secretKeyRef:
      name: {{ include "oxide.secretName" . | include "oxide.text" }}
      key: {{ .Values.secret.keys.host | include "oxide.text" }}
- name: OXIDE_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "oxide.secretName" . | include "oxide.text" }}
      key: {{ .Values.secret.keys.token | include "oxide.text" }}
# The same token as a file, which wins and is read again when the Secret changes: a new
# token needs no restart.
- name: OXIDE_TOKEN_FILE
  value: /etc/oxide/token
{{- end -}}

{{- /* Empty means the public authorities. It is always there, for kustomize/node-keeper to copy. */ -}}
{{- define "oxide.rackCA" -}}
- name: OXIDE_CA_FILE
  value: {{ ternary "/etc/oxide/ca.crt" "" .Values.ownCA | quote }}
{{- end -}}

{{- /* The variables of controller and audit for the rack, the project and the cluster's id. */ -}}
{{- define "oxide.rackEnv" -}}
{{ include "oxide.rackLogin" . }}
- name: OXIDE_PROJECT
  valueFrom:
    secretKeyRef:
      name: {{ include "oxide.secretName" . | include "oxide.text" }}
      key: {{ .Values.secret.keys.project | include "oxide.text" }}
{{- $id := include "oxide.clusterId" . }}
{{- if eq $id "unasked" }}
# No cluster was asked for its id when this was rendered: the Secret has to have one, which
# no other cluster in the project has.
{{- end }}
- name: OXIDE_CLUSTER_ID
  {{- if hasPrefix "is " $id }}
  value: {{ trimPrefix "is " $id | quote }}
  {{- else }}
  valueFrom:
    secretKeyRef:
      name: {{ include "oxide.secretName" . | include "oxide.text" }}
      key: {{ .Values.secret.keys.clusterId | include "oxide.text" }}
      {{- if eq $id "nothing" }}
      optional: true
      {{- end }}
  {{- end }}
{{ include "oxide.rackCA" . }}
{{- end -}}

{{- define "oxide.rackAccess" -}}
# Optional, so that a missing key is reported by the variables above.
- name: rack-access
  secret:
    secretName: {{ include "oxide.secretName" . | include "oxide.text" }}
    optional: true
    defaultMode: 0440
    items:
      - key: {{ .Values.secret.keys.token | include "oxide.text" }}
        path: token
      {{- if .Values.ownCA }}
      - key: {{ .Values.secret.keys.caBundle | include "oxide.text" }}
        path: ca.crt
      {{- end }}
{{- end -}}

{{- /* The probes by which kubelet learns that a driver is stuck, or that it cannot work, and why. */ -}}
{{- define "oxide.probes" -}}
# A driver that is stuck is restarted: kubelet asks the liveness-probe container, which asks the
# driver at a separate socket. A restart solves no problem of a token, a rack or a missing program.
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
# A driver that cannot work is not ready: the rack refuses it or has not answered yet, or programs are
# missing. The program prints the reason, and kubelet shows it in the pod's events.
readinessProbe:
  exec:
    command: [/oxide-csi-plugin, ready]
  periodSeconds: 10
  timeoutSeconds: 5
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

{{- define "oxide.kubeApiMount" -}}
- name: kube-api-access
  mountPath: /var/run/secrets/kubernetes.io/serviceaccount
  readOnly: true
{{- end -}}
