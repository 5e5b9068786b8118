{{- /* Who may read metrics, of (dict "root" $ "ports" <list>); nothing else comes in. */ -}}
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

{{- /* What pods may call, of (dict "cidrs" <list> "port" <number>). */ -}}
{{- define "oxide.egress" -}}
- to:
    {{- range .cidrs }}
    - ipBlock:
        cidr: {{ . | quote }}
    {{- end }}
  ports:
    - port: {{ .port }}
{{- end -}}
