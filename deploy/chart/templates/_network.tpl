{{- /* The only ingress that is allowed: metrics, of (dict "root" $ "ports" <list>). */ -}}
{{- define "oxide.metricsIngress" -}}
{{- if .root.Values.metrics.enabled -}}
ingress:
  - ports:
      {{- range .ports }}
      - port: {{ . }}
      {{- end }}
    {{- with .root.Values.networkPolicy.metricsFrom }}
    from:
      {{- toYaml . | nindent 6 }}
    {{- end }}
{{- else -}}
ingress: []
{{- end -}}
{{- end -}}

{{- /* The egress of a pod that calls the rack and Kubernetes. */ -}}
{{- define "oxide.callsOut" -}}
egress:
  # The rack.
  {{- include "oxide.egress" .Values.networkPolicy.rack | nindent 2 }}
  # Kubernetes' API server.
  {{- include "oxide.egress" .Values.networkPolicy.apiServer | nindent 2 }}
  # A name service, wherever the cluster has it.
  - ports:
      - port: 53
        protocol: UDP
      - port: 53
        protocol: TCP
{{- end -}}

{{- /* An egress rule, of (dict "cidrs" <list> "port" <number>). */ -}}
{{- define "oxide.egress" -}}
- to:
    {{- range .cidrs }}
    - ipBlock:
        cidr: {{ . | quote }}
    {{- end }}
  ports:
    - port: {{ .port }}
{{- end -}}
