package doctor

import (
	"cmp"
	"reflect"
	"regexp"
	"strconv"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

const (
	hiddenValue = "***"
	hiddenText  = "a text that is not shown here, because its form is not known"
)

const (
	nameForm = `[a-z0-9](?:[-a-z0-9.]*[a-z0-9])?`
	idForm   = `[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}`
)

// fieldForms maps a field's JSON name to the expression that its value must match. Other values are
// hidden, and fields without an expression are removed. For messages, see the variable phrases.
var fieldForms = func() map[string]*regexp.Regexp {
	forms := map[string]*regexp.Regexp{}
	for fields, form := range map[string]string{
		"name namespace uid driver attacher volumeName storageClassName nodeName diskName " +
			"persistentVolumeName claimName volume.kubernetes.io/storage-provisioner": `(?:` + nameForm +
			`/)?` + nameForm,
		"finalizers":                    `(?:` + nameForm + `/)?[A-Za-z0-9][-A-Za-z0-9._]*`,
		"volumeHandle nodeID":           idForm,
		"persistentVolumeReclaimPolicy": `Delete|Recycle|Retain`,
		"storage":                       `[0-9.]{1,20}[KMGTPEkmun]?i?`,
		"kind": `PersistentVolume(Claim)?|VolumeSnapshot(Content)?|VolumeAttachment|CSINode|Node|Pod|` +
			`Event|DaemonSet|ReplicaSet|StatefulSet|Deployment|Job`,
		"phase": `Available|Bound|Released|Failed|Lost|Pending|Running|Succeeded|Unknown`,
		"type":  `Ready`, "status": `True|False|Unknown`, "volumeMode": `Block|Filesystem`,
		"reason": strings.Join(eventReasons, "|") + `|ContainerCreating|PodInitializing|` +
			`CrashLoopBackOff|ImagePullBackOff|ErrImagePull|ErrImageNeverPull|InvalidImageName|` +
			`ImageInspectError|RegistryUnavailable|CreateContainer(Config)?Error|RunContainerError`,
	} {
		for field := range strings.FieldsSeq(fields) {
			forms[field] = regexp.MustCompile(`^(?:` + form + `)$`)
		}
	}
	return forms
}()

// phrases matches the parts of messages that are shown: texts that the components of Kubernetes
// write, whose variable parts are numbers, names and ids.
var phrases = regexp.MustCompile(strings.NewReplacer("NAME", nameForm, "ID", idForm).Replace(
	// texts of the scheduler
	`[0-9]+/[0-9]+ nodes are available|[0-9]+ Insufficient (?:cpu|memory|ephemeral-storage|pods)|` +
		`[0-9]+ Too many pods|pod has unbound immediate PersistentVolumeClaims|` +
		`[0-9]+ node\(s\) (?:had untolerated taint|were unschedulable|exceed max volume count|` +
		`had volume node affinity conflict|didn't match Pod's node affinity/selector|` +
		`didn't find available persistent volumes to bind|didn't match pod (?:anti-)?affinity rules)|` +
		`persistentvolumeclaim "NAME" (?:not found|is being deleted)|` +
		// texts of the volume controllers and of the provisioner
		`storageclass\.storage\.k8s\.io "NAME" not found|` +
		`no persistent volumes available for this claim and no storage class is set|` +
		`waiting for first consumer to be created before binding|waiting for pod NAME to be scheduled|` +
		`Waiting for a volume to be created|failed to provision volume with StorageClass "NAME"|` +
		`External provisioner is provisioning volume for claim "NAME/NAME"|` +
		`Multi-Attach error for volume "NAME"|Volume is already used by pod\(s\) NAME(?:, NAME)*|` +
		`Volume is already exclusively attached to one node and can't be attached to another|` +
		`timed out waiting for external-attacher of NAME CSI driver to attach volume ID|` +
		// texts of the kubelet
		`(?:(?:MountVolume|UnmountVolume|MapVolume|AttachVolume|UnmapVolume)\.[A-Za-z]{2,20} )?` +
		`(?:failed|succeeded) for volume "NAME"|(?:configmap|secret) "NAME" not found|` +
		`driver name NAME not found in the list of registered CSI drivers|` +
		`Unable to attach or mount volumes|unmounted volumes=\[NAME(?: NAME)*\]|exit status [0-9]{1,3}|` +
		`rpc error: code = [A-Z][A-Za-z]{1,20}|context (?:deadline exceeded|canceled)|` +
		`timed out waiting for the condition|` +
		// texts of kubectl
		`Error from server \([A-Z][A-Za-z]{2,20}\)|Unable to connect to the server|` +
		`[Ff]orbidden|[Cc]onnection to the server|connection refused|no such host|i/o timeout|` +
		`You must be logged in to the server|the server doesn't have a resource type "NAME"|` +
		`container not found \("NAME"\)|command terminated with exit code [0-9]{1,3}|signal: killed|` +
		`executable file not found in \$PATH`))

func known(text string) string {
	return cmp.Or(strings.Join(phrases.FindAllString(text, -1), " … "), hiddenText)
}

// ownError matches an error of a CSI driver, as the sidecars and the kubelet quote it, in one line.
var ownError = regexp.MustCompile(`^(?:(?:[A-Za-z]+\.[A-Za-z]+ )?failed for volume "(` + nameForm +
	`)" : |failed to provision volume with StorageClass "` + nameForm + `": )?` +
	`rpc error: code = [A-Za-z]+ desc = [^\x00-\x1f]+$`)

// takenError matches an error of a CSI driver as the csi-snapshotter quotes it, with escapes.
var takenError = regexp.MustCompile(`^Failed to [a-z ]+: failed to take snapshot of the volume ` +
	idForm + `: (".*")$`)

// text() returns all of a message if it is an error of this driver about one of the driver's
// volumes. Of any other message it returns the known phrases.
func (s *sifter) text(message string) string {
	if quoted := takenError.FindStringSubmatch(message); quoted != nil {
		if text, err := strconv.Unquote(quoted[1]); err == nil {
			message = text
		}
	}
	if found := ownError.FindStringSubmatch(message); found != nil && !s.foreign &&
		(found[1] == "" || s.volumes[found[1]]) {
		if _, _, ok := csierr.ParseMessage(message); ok {
			return message
		}
	}
	return known(message)
}

type sifter struct {
	volumes map[string]bool // the PersistentVolumes of this driver
	secrets []string
	foreign bool // set for another driver's objects, and events about them: hides their errors
}

// sift removes from the objects what a diagnosis must not show. It replaces secrets before it
// keeps what matches an expression, because an expression may match a part of a secret.
func (g *gatherer) sift() {
	s := &sifter{volumes: map[string]bool{}}
	theirs := map[kube.Reference]bool{}
	for _, o := range g.e.Cluster.Objects {
		provisioner := o.Metadata.Annotations.Provisioner
		if o.Kind != kindEvent {
			theirs[reference(&o)] = provisioner != "" && provisioner != volume.DriverName ||
				o.Kind == kindVolume && o.Spec.CSI.Driver != volume.DriverName ||
				o.Kind == kindContent && o.Spec.Driver != volume.DriverName ||
				o.Kind == kindAttachment && o.Spec.Attacher != volume.DriverName
		}
		if o.Kind == kindVolume && o.Spec.CSI.Driver == volume.DriverName {
			s.volumes[o.Metadata.Name] = true
		}
		for _, option := range o.Spec.MountOptions {
			_, value, _ := strings.Cut(option, "=")
			for _, word := range []string{option, value, strings.Trim(strconv.Quote(value), `"`)} {
				if len(word) >= 4 { // shorter words are flags such as "ro", not secrets
					s.secrets = append(s.secrets, word)
				}
			}
		}
	}
	for _, objects := range [][]kube.Object{g.e.Cluster.Objects, g.e.Nodes.DriverPods} {
		for i := range objects {
			s.foreign = theirs[reference(&objects[i])]
			s.keep("", reflect.ValueOf(&objects[i]).Elem())
		}
	}
}

func (s *sifter) keep(field string, v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			s.keep(field, v.Elem())
		}
	case reflect.Struct:
		for i := range v.NumField() {
			name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
			if f := v.Field(i); f.CanSet() {
				s.keep(name, f)
			}
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.String && fieldForms[field] == nil {
			v.SetZero()
		}
		for i := range v.Len() {
			s.keep(field, v.Index(i))
		}
	case reflect.Map:
		for _, key := range v.MapKeys() {
			item := reflect.New(v.Type().Elem()).Elem()
			item.Set(v.MapIndex(key))
			if s.keep(key.String(), item); fieldForms[key.String()] == nil {
				item = reflect.Value{} // removes the key
			}
			v.SetMapIndex(key, item)
		}
	case reflect.String:
		v.SetString(s.value(field, v.String()))
	}
}

func (s *sifter) value(field, text string) string {
	form := fieldForms[field]
	switch {
	case text == "":
	case field == "message":
		return s.text(s.redact(text))
	case field == "csi.oxide.computer/cold-attach-plan":
		return hiddenValue // the diagnosis needs only the fact that there is a plan
	case form == nil:
		return ""
	case len(text) > 2*253 || !form.MatchString(text):
		return hiddenValue
	}
	return text
}

// redact replaces secrets and a rack's tokens in a text. Overlapping secrets are replaced as one.
func (s *sifter) redact(text string) string {
	secret := make([]bool, len(text))
	for _, word := range s.secrets {
		for from := 0; ; from++ {
			at := strings.Index(text[from:], word)
			if at < 0 {
				break
			}
			from += at
			for i := range len(word) {
				secret[from+i] = true
			}
		}
	}
	var clean strings.Builder
	for i := range len(text) {
		switch {
		case !secret[i]:
			clean.WriteByte(text[i])
		case i == 0 || !secret[i-1]:
			clean.WriteString(hiddenValue)
		}
	}
	return csierr.WithoutTokens(clean.String())
}

// ownPods adds the pods in the driver's namespace whose controller is the chart's DaemonSet, or a
// ReplicaSet of the chart's Deployment. It compares UIDs, because every user may set labels and
// names. Without the DaemonSet, the driver's pods count as unseen.
func (g *gatherer) ownPods(objects []kube.Object) {
	namespace, owners := g.e.Nodes.Namespace, map[string]string{} // keys: UIDs; values: kinds
	for _, kind := range []string{kindDaemonSet, kindDeployment, kindReplicaSet, kindPod} {
		for _, o := range objects {
			owner := o.Metadata.Controller()
			owned := owner.UID != "" && owners[owner.UID] == owner.Kind
			switch {
			case o.Kind != kind || o.Metadata.Namespace != namespace:
			case kind == kindDaemonSet && runsDriver(o, "-node"),
				kind == kindDeployment && runsDriver(o, "-controller"), kind == kindReplicaSet && owned:
				owners[o.Metadata.UID] = kind
			case kind == kindPod && owned && kube.IsName(o.Metadata.Name):
				g.e.Nodes.DriverPods = append(g.e.Nodes.DriverPods, o)
			}
		}
		if kind == kindDaemonSet && len(owners) == 0 {
			g.e.Cluster.Unseen[kindDriverPod] = "no DaemonSet of the driver is in the namespace " +
				namespace + "; name its namespace with --driver-namespace"
			return
		}
	}
}

func runsDriver(o kube.Object, suffix string) bool {
	for _, container := range o.Spec.Template.Spec.Containers {
		if container.Name == driverContainer {
			return strings.HasSuffix(o.Metadata.Name, suffix)
		}
	}
	return false
}
