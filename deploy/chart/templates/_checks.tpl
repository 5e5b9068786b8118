{{- /* An invalid value ends `helm template` with an explanation. The schema checks types, names and fixed
words. This file checks what the schema could only check with regular expressions, and _parameters.tpl checks the
parameters of storage classes. Each problem is a line. */ -}}

{{- define "oxide.problems" -}}
{{- template "oxide.problems.secret" . }}
{{- template "oxide.problems.driver" . }}
{{- template "oxide.problems.names" . }}
{{- template "oxide.problems.pods" . }}
{{- template "oxide.problems.nodeKeeper" . }}
{{- template "oxide.problems.classes" . }}
{{- template "oxide.problems.images" . }}
{{- template "oxide.problems.network" . }}
{{- template "oxide.problems.audit" . }}
{{- end -}}

{{- define "oxide.problems.secret" -}}
{{- $s := .Values.secret }}
{{- if and $s.create $s.existing }}
secret.create and secret.existing are both set: name a Secret of yours, or have the chart make oxide-secret, not both.
{{- end }}
{{- if $s.create }}
{{- range $name := list "host" "token" "project" }}
{{- if empty (index $s $name) }}
secret.{{ $name }} is empty: with secret.create the chart needs the rack's address, a token and a project.
{{- end }}
{{- end }}
{{- if and $s.host (not (regexMatch "^https?://[^/?#@[:space:]]+/?$" $s.host)) }}
secret.host is not the address of a rack: it has to look like https://silo.sys.example.com.
{{- end }}
{{- if and .Values.ownCA (empty $s.caBundle) }}
secret.caBundle is empty: with ownCA and secret.create the chart needs the PEM certificates to trust.
{{- end }}
{{- else }}
{{- range $name := list "host" "token" "project" "caBundle" }}
{{- if index $s $name }}
secret.{{ $name }} is given, and would be left unused: set secret.create, or put it into your Secret's key {{ index $s.keys $name }}.
{{- end }}
{{- end }}
{{- end }}
{{- if and $s.caBundle (not .Values.ownCA) }}
secret.caBundle is given, and ownCA is off: set ownCA to trust those certificates.
{{- end }}
{{- range $name, $key := $s.keys }}
{{- if not (regexMatch "^[-._a-zA-Z0-9]+$" $key) }}
secret.keys.{{ $name }} is {{ $key | quote }}, which is not a valid key of a Secret: use letters, digits, dots, hyphens and underscores.
{{- end }}
{{- end }}
{{- end -}}

{{- define "oxide.problems.driver" -}}
{{- $word := "[A-Za-z0-9]([-A-Za-z0-9._]{0,61}[A-Za-z0-9])?" }}
{{- if and .Values.clusterId (not (regexMatch (printf "^%s$" $word) .Values.clusterId)) }}
clusterId is {{ .Values.clusterId | quote }}: it has to be at most 63 letters, digits, dots, hyphens and underscores, with a letter or digit at both ends.
{{- end }}
{{- $place := printf "%s=%s(,%s=%s)*" $word $word $word $word }}
{{- range $name := list "topology" "topologyAlso" }}
{{- $value := index $.Values $name }}
{{- if and $value (not (regexMatch (printf "^%s(;%s)*$" $place $place) $value)) }}
{{ $name }} is {{ $value | quote }}: it has to be key=value pairs such as rack=a,zone=b.
{{- end }}
{{- if regexMatch "(?i)(^|[,;])instance=" $value }}
{{ $name }} has the key instance, with which nodes name their own instance if topologyInstance is set: use another key.
{{- end }}
{{- end }}
{{- if contains ";" .Values.topology }}
topology names several locations: a node is in one; further locations that reach the rack's disks belong into topologyAlso.
{{- end }}
{{- if and .Values.topologyAlso (empty .Values.topology) }}
topologyAlso is given without topology: set the rack's location first.
{{- end }}
{{- if or (lt (int .Values.maxDisks) 2) (gt (int .Values.maxDisks) 1000) }}
maxDisks is {{ .Values.maxDisks }}: it has to be a number from 2 to 1000, what the rack lets an instance have; the boot disk is one of them.
{{- end }}
{{- $duration := "^([0-9]+(\\.[0-9]+)?(ms|s|m|h))+$" }}
{{- $durations := dict "deviceTimeout" .Values.deviceTimeout "livenessProbe.timeout" .Values.livenessProbe.timeout }}
{{- range $name := list "provisioner" "attacher" "snapshotter" }}
{{- $_ := set $durations (printf "%s.timeout" $name) (index $.Values $name).timeout }}
{{- $_ := set $durations (printf "%s.retryIntervalMax" $name) (index $.Values $name).retryIntervalMax }}
{{- if lt (int (index $.Values $name).workerThreads) 1 }}
{{ $name }}.workerThreads is {{ (index $.Values $name).workerThreads }}: at least one call has to run at a time.
{{- end }}
{{- end }}
{{- range $name, $value := $durations }}
{{- if or (not (regexMatch $duration $value)) (regexMatch "^[0.]+(ms|s|m|h)$" $value) }}
{{ $name }} is {{ $value | quote }}: it has to be a duration such as 30s or 2m.
{{- end }}
{{- end }}
{{- if and .Values.instanceMetadata.enabled (eq .Values.instanceMetadata.via "env") (semverCompare "<1.35.0-0" .Capabilities.KubeVersion.Version) }}
instanceMetadata.via is env, which needs Kubernetes 1.35 (this is {{ .Capabilities.KubeVersion.Version }}): use file, which every version has.
{{- end }}
{{- $ports := list 9808 9811 }}
{{- range $name := list "controllerPort" "provisionerPort" "attacherPort" "snapshotterPort" }}
{{- $port := int (index $.Values.metrics $name) }}
{{- if or (lt $port 1) (gt $port 65535) (has $port $ports) }}
metrics.{{ $name }} is {{ $port }}: it has to be a port from 1 to 65535, and not {{ join ", " $ports }}, which others in the pod have.
{{- end }}
{{- $ports = append $ports $port }}
{{- end }}
{{- $port := int .Values.metrics.nodePort }}
{{- if or (lt $port 1) (gt $port 65535) (has $port (list 9808 9811)) }}
metrics.nodePort is {{ $port }}: it has to be a port from 1 to 65535, and not 9808 or 9811, which the sidecars have.
{{- end }}
{{- if and .Values.metrics.podMonitor (not .Values.metrics.enabled) }}
metrics.podMonitor is set and metrics.enabled is not: there would be nothing to scrape.
{{- end }}
{{- if and .Values.metrics.prometheusRule.enabled (not .Values.metrics.enabled) }}
metrics.prometheusRule.enabled is set and metrics.enabled is not: there would be nothing to watch.
{{- end }}
{{- end -}}

{{- define "oxide.problems.names" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$" (include "oxide.fullname" .)) }}
fullnameOverride is {{ .Values.fullnameOverride | quote }}: it has to be at most 40 lower-case letters, digits and hyphens, that begin with a letter and do not end with a hyphen.
{{- end }}
{{- if and .Values.nameOverride (not (regexMatch "^[A-Za-z0-9]([-A-Za-z0-9._]{0,61}[A-Za-z0-9])?$" .Values.nameOverride)) }}
nameOverride is {{ .Values.nameOverride | quote }}: it has to be the value of a label, at most 63 letters, digits, dots, hyphens and underscores, with a letter or digit at both ends.
{{- end }}
{{- $accounts := list }}
{{- range $of := list "controller" "node" "nodeKeeper" "audit" }}
{{- $account := include "oxide.account" (dict "root" $ "of" $of) }}
{{- if has $account $accounts }}
{{ $of }}.serviceAccountName is {{ $account }}, which another pod has, too: each needs an account of its own, with no more rights than it uses.
{{- end }}
{{- $accounts = append $accounts $account }}
{{- end }}
{{- $labels := dict "commonLabels" .Values.commonLabels "controller.podLabels" .Values.controller.podLabels "node.podLabels" .Values.node.podLabels "nodeKeeper.podLabels" .Values.nodeKeeper.podLabels "metrics.podMonitorLabels" .Values.metrics.podMonitorLabels "metrics.prometheusRule.labels" .Values.metrics.prometheusRule.labels "metrics.dashboard.labels" .Values.metrics.dashboard.labels }}
{{- range $name, $given := $labels }}
{{- range $label := list "app" "app.kubernetes.io/name" }}
{{- if hasKey ($given | default dict) $label }}
{{ $name }} has {{ $label }}, by which the pods are found: leave it as it is.
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "oxide.problems.pods" -}}
{{- if lt (int .Values.controller.replicas) 1 }}
controller.replicas is {{ .Values.controller.replicas }}: at least one controller has to run, or no volume is made, attached or deleted.
{{- end }}
{{- if and (.Values.controller.affinity | default dict).podAntiAffinity (ne .Values.controller.antiAffinity "none") }}
controller.affinity has a podAntiAffinity, and controller.antiAffinity is {{ .Values.controller.antiAffinity }}: set it to none, so that yours is the only one.
{{- end }}
{{- if and .Values.controller.hostNetwork (gt (int .Values.controller.replicas) 1) (ne .Values.controller.antiAffinity "required") }}
controller.hostNetwork is set, and controller.antiAffinity is {{ .Values.controller.antiAffinity }}: replicas on one node would want the same ports; set it to required, or controller.replicas to 1.
{{- end }}
{{- if and (eq (.Values.controller.dnsPolicy | default "") "None") (empty (.Values.controller.dnsConfig | default dict).nameservers) }}
controller.dnsPolicy is None, and controller.dnsConfig has no nameservers: the controller could not find the rack.
{{- end }}
{{- range $name := list "kubeletDir" "stateDir" }}
{{- $path := index $.Values.node $name }}
{{- if or (not (regexMatch "^(/[^/[:space:]]+)+$" $path)) (regexMatch "(^|/)\\.\\.?(/|$)" $path) }}
node.{{ $name }} is {{ $path | quote }}: it has to be an absolute path without a slash at its end, such as {{ ternary "/var/lib/kubelet" "/run/csi.oxide.computer" (eq $name "kubeletDir") }}.
{{- end }}
{{- end }}
{{- $state := printf "%s/" .Values.node.stateDir }}
{{- $kubelet := printf "%s/" .Values.node.kubeletDir }}
{{- if or (hasPrefix $kubelet $state) (hasPrefix $state $kubelet) }}
node.stateDir is {{ .Values.node.stateDir | quote }}: kubelet's directory and the driver's may not be in each other; use another.
{{- end }}
{{- if not (regexMatch "^([1-9][0-9]*|[1-9][0-9]?%|100%)$" (toString .Values.node.maxUnavailable)) }}
node.maxUnavailable is {{ .Values.node.maxUnavailable | toString | quote }}: it has to be a number of nodes, at least 1, or a percentage such as 10%.
{{- end }}
{{- $period := int .Values.csiDriver.nodeAllocatableUpdatePeriodSeconds }}
{{- if and (ne $period 0) (lt $period 10) }}
csiDriver.nodeAllocatableUpdatePeriodSeconds is {{ $period }}: Kubernetes wants at least 10 seconds; 0 leaves it out.
{{- end }}
{{- range $name := list "periodSeconds" "failureThreshold" }}
{{- if lt (int (index $.Values.livenessProbe $name)) 1 }}
livenessProbe.{{ $name }} is {{ index $.Values.livenessProbe $name }}: it has to be at least 1.
{{- end }}
{{- end }}
{{- range $pod := list "controller" "node" }}
{{- range (index $.Values $pod).extraEnv }}
{{- if hasPrefix "CSI_" .name }}
{{ $pod }}.extraEnv has {{ .name }}: names that begin with CSI_ belong to the CSI specification.
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "oxide.problems.classes" -}}
{{- $names := list }}
{{- $defaults := list }}
{{- $classes := .Values.extraStorageClasses | default list }}
{{- if .Values.storageClass.create }}
{{- $classes = prepend $classes .Values.storageClass }}
{{- end }}
{{- range $classes }}
{{- $name := .name | default "" }}
{{- if not (regexMatch "^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$" $name) }}
a storage class is called {{ $name | quote }}: a name has lower-case letters, digits, dots and hyphens, with a letter or digit at both ends.
{{- end }}
{{- if has $name $names }}
two storage classes are called {{ $name }}: each needs a name of its own.
{{- end }}
{{- $names = append $names $name }}
{{- if .default }}
{{- $defaults = append $defaults $name }}
{{- end }}
{{- template "oxide.problems.parameters" (dict "root" $ "class" .) }}
{{- if and .allowedTopologies (not (include "oxide.topology" $)) }}
storage class {{ $name }} has allowedTopologies, and neither topology nor topologyInstance is set: no node would report one, and no volume could be created.
{{- end }}
{{- end }}
{{- if gt (len $defaults) 1 }}
the storage classes {{ join " and " $defaults }} are all the default: one of them can be.
{{- end }}
{{- $names := list }}
{{- $defaults := list }}
{{- range $i, $class := prepend (.Values.snapshots.classes | default list) .Values.snapshots.class }}
{{- $name := $class.name | default "" }}
{{- if not (regexMatch "^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$" $name) }}
a snapshot class is called {{ $name | quote }}: a name has lower-case letters, digits, dots and hyphens, with a letter or digit at both ends.
{{- end }}
{{- if or $i $class.create }}
{{- if has $name $names }}
two snapshot classes are called {{ $name }}: each needs a name of its own.
{{- end }}
{{- $names = append $names $name }}
{{- if $class.default }}
{{- $defaults = append $defaults $name }}
{{- end }}
{{- end }}
{{- end }}
{{- if gt (len $defaults) 1 }}
the snapshot classes {{ join " and " $defaults }} are all the default: one of them can be.
{{- end }}
{{- end -}}

{{- define "oxide.problems.images" -}}
{{- $registry := "^([A-Za-z0-9.\\[\\]-][A-Za-z0-9.:_\\[\\]-]*(/[a-z0-9._-]+)*/?)?$" }}
{{- if not (regexMatch $registry .Values.imageRegistry) }}
imageRegistry is {{ .Values.imageRegistry | quote }}: it has to be a registry without a scheme, such as registry.example.com/mirror.
{{- end }}
{{- $images := dict "image" .Values.image "nodeImage" .Values.nodeImage }}
{{- range $name := list "instanceMetadata" "nodeKeeper" "provisioner" "attacher" "snapshotter" "registrar" "livenessProbe" }}
{{- $_ := set $images (printf "%s.image" $name) (index $.Values $name).image }}
{{- end }}
{{- if .Values.audit.enabled }}
{{- $_ := set $images "audit.kubectlImage" .Values.audit.kubectlImage }}
{{- end }}
{{- if .Values.test.enabled }}
{{- $_ := set $images "test.image" .Values.test.image }}
{{- if and (empty .Values.test.image.tag) (empty .Values.test.image.digest) }}
test.image has neither a tag nor a digest: name an image with sh, sync and cat, which the driver's images have not.
{{- end }}
{{- end }}
{{- range $name, $image := $images }}
{{- if not (regexMatch "^[a-z0-9]+([._/-]+[a-z0-9]+)*$" $image.repository) }}
{{ $name }}.repository is {{ $image.repository | quote }}: it has to be a name such as oxidecomputer/oxide-csi-plugin; registry, tag and digest are values of their own.
{{- end }}
{{- if not (regexMatch $registry $image.registry) }}
{{ $name }}.registry is {{ $image.registry | quote }}: it has to be a registry without a scheme, such as registry.example.com/mirror.
{{- end }}
{{- if and $image.digest (not (regexMatch "^sha256:[0-9a-f]{64}$" $image.digest)) }}
{{ $name }}.digest is {{ $image.digest | quote }}: it has to be sha256: and 64 hexadecimal digits.
{{- end }}
{{- end }}
{{- end -}}

{{- define "oxide.problems.network" -}}
{{- range $name := list "rack" "apiServer" }}
{{- $cidrs := (index $.Values.networkPolicy $name).cidrs }}
{{- if and $.Values.networkPolicy.enabled (empty $cidrs) }}
networkPolicy.{{ $name }}.cidrs is empty: the controller could not reach {{ ternary "the rack" "Kubernetes' API server" (eq $name "rack") }}; name its addresses, such as 192.0.2.10/32.
{{- end }}
{{- range $cidrs }}
{{- if ne (include "oxide.cidr" .) "true" }}
networkPolicy.{{ $name }}.cidrs has {{ . | quote }}: it has to be addresses with a prefix length, such as 192.0.2.10/32.
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "oxide.problems.audit" -}}
{{- $image := .Values.audit.kubectlImage }}
{{- if and .Values.audit.enabled (or (empty $image.repository) (and (empty $image.tag) (empty $image.digest))) }}
audit.kubectlImage has no repository, or neither a tag nor a digest: name an image with kubectl and sh, which the driver's has not.
{{- end }}
{{- if not (regexMatch "^(@[a-z]+|[^[:space:]]+([[:space:]]+[^[:space:]]+){4})$" .Values.audit.schedule) }}
audit.schedule is {{ .Values.audit.schedule | quote }}: it has to be five fields of cron, such as 17 3 * * *.
{{- end }}
{{- range .Values.audit.extraArgs }}
{{- if regexMatch "^--?delete($|=)" . }}
audit.extraArgs has {{ . }}: the CronJob only reports; a person deletes, as docs/audit.md describes.
{{- end }}
{{- end }}
{{- end -}}

{{- /* "true" if a text is a CIDR: four numbers, or up to eight groups with one "::" for those that are left out. */ -}}
{{- define "oxide.cidr" -}}
{{- $number := "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])" }}
{{- $four := regexMatch (printf "^%s([.]%s){3}/(3[0-2]|[12]?[0-9])$" $number $number) . }}
{{- $six := regexMatch "^(:|[0-9a-fA-F]{1,4}:)(:|[0-9a-fA-F]{1,4}:)*([0-9a-fA-F]{1,4})?/(12[0-8]|1[01][0-9]|[1-9]?[0-9])$" . }}
{{- $address := regexReplaceAll "/.*" . "" }}
{{- $groups := regexFindAll "[0-9a-fA-F]+" $address -1 | len }}
{{- $gaps := sub (len (splitList "::" $address)) 1 }}
{{- $ends := regexMatch "^:[^:]|[^:]:$|:::" $address }}
{{- or $four (and $six (not $ends) (or (and (eq $gaps 0) (eq $groups 8)) (and (eq $gaps 1) (lt $groups 8)))) }}
{{- end -}}
