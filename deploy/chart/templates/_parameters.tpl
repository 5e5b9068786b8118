{{- /* The problems in the parameters of a storage class, of (dict "root" $ "class" <values>). The driver would
report them only when the first volume is created. parameters.yaml lists the parameters that it knows. Only the
driver checks rules about two options, such as inodeSize and fsBlockSize. */ -}}
{{- define "oxide.problems.parameters" -}}
{{- $known := .root.Files.Get "parameters.yaml" | fromYaml }}
{{- $class := .class.name | default "" }}
{{- $given := .class.parameters | default dict }}
{{- $fsKey := "csi.storage.k8s.io/fstype" }}
{{- range $key, $value := $given }}
{{- if not (has $key (append $known.parameters $fsKey)) }}
storage class {{ $class }} has the parameter {{ $key }}, which the driver does not know; it knows {{ join ", " $known.parameters }} and {{ $fsKey }}.
{{- end }}
{{- end }}
{{- $lists := dict "diskType" $known.diskType "placement" $known.placement "blockSize" $known.blockSize $fsKey $known.filesystems }}
{{- range $key, $valid := $lists }}
{{- $strings := list }}
{{- range $valid }}
{{- $strings = append $strings (toString .) }}
{{- end }}
{{- if and (hasKey $given $key) (not (has (index $given $key | toString) $strings)) }}
storage class {{ $class }} has {{ $key }} {{ index $given $key | toString | quote }}: it is one of {{ join ", " $strings }}.
{{- end }}
{{- end }}
{{- if and (hasKey $given "imageId") (not (regexMatch "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$" (toString $given.imageId))) }}
storage class {{ $class }} has imageId {{ toString $given.imageId | quote }}: it has to be the UUID of an image, not a name.
{{- end }}
{{- if eq (toString $given.diskType) "local" }}
{{- if ne (toString ($given.blockSize | default $known.localBlockSize)) (toString $known.localBlockSize) }}
storage class {{ $class }} has diskType local and blockSize {{ $given.blockSize }}: local disks have {{ $known.localBlockSize }}.
{{- end }}
{{- if $given.imageId }}
storage class {{ $class }} has diskType local and imageId: local disks are created blank.
{{- end }}
{{- end }}
{{- if eq (toString $given.placement) "instance" }}
{{- if not .root.Values.topologyInstance }}
storage class {{ $class }} has placement instance, and topologyInstance is off: set it, so that nodes report their instance.
{{- end }}
{{- if ne (.class.volumeBindingMode | default "WaitForFirstConsumer") "WaitForFirstConsumer" }}
storage class {{ $class }} has placement instance and volumeBindingMode {{ .class.volumeBindingMode }}: it has to be WaitForFirstConsumer, so that the scheduler chooses the instance.
{{- end }}
{{- end }}
{{- $options := toString ($given.mkfsOptions | default "") | trim }}
{{- if $options }}
{{- $fs := index $given $fsKey | default (first $known.filesystems) | toString }}
{{- template "oxide.problems.mkfsOptions" (dict "class" $class "options" $options "fs" $fs "known" $known.mkfsOptions) }}
{{- end }}
{{- end -}}

{{- define "oxide.problems.mkfsOptions" -}}
{{- $class := .class }}
{{- $fs := .fs }}
{{- $known := .known }}
{{- $seen := list }}
{{- range splitList "," .options }}
{{- $pair := splitn "=" 2 (trim .) }}
{{- $name := $pair._0 }}
{{- $value := $pair._1 | default "" }}
{{- $rule := index $known $name }}
{{- if not $rule }}
storage class {{ $class }} has the mkfsOptions {{ $name | quote }}, which is not allowed; allowed are {{ keys $known | sortAlpha | join ", " }}.
{{- else }}
{{- $valid := true }}
{{- if $rule.values }}
{{- $valid = has $value $rule.values }}
{{- else if $rule.pattern }}
{{- $valid = regexMatch $rule.pattern $value }}
{{- else }}
{{- $valid = and (regexMatch "^(0|[1-9][0-9]{0,8})$" $value) (ge (int $value) (int (first $rule.range))) (le (int $value) (int (last $rule.range))) }}
{{- end }}
{{- if not $valid }}
storage class {{ $class }} has the mkfsOptions {{ $name }}={{ $value }}: it has to be {{ $rule.valid }}.
{{- end }}
{{- if not (has $fs $rule.filesystems) }}
storage class {{ $class }} has the mkfsOptions {{ $name }}, which {{ $fs }} does not have; it is for {{ join ", " $rule.filesystems }}.
{{- end }}
{{- if has $name $seen }}
storage class {{ $class }} has the mkfsOptions {{ $name }} twice.
{{- end }}
{{- $seen = append $seen $name }}
{{- end }}
{{- end }}
{{- end -}}
