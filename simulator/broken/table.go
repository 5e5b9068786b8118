package broken

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// table lists all mutations except those that dataplane.Tampers lists.
var table = []Mutation{
	{Name: "A01-no-code", Says: "errors have no error_code", DriverSays: "RackUnknown",
		After: func(x *Interception) {
			if x.Answer.Status >= 400 {
				x.EditBody(func(body map[string]any) { delete(body, "error_code") })
			}
		}},
	{Name: "A01-taken-name-is-reused",
		Says:       "creating a disk whose name is taken returns the disk that has it",
		DriverSays: "EffectUnknown",
		Before: func(x *Interception) {
			if d := x.namesake(); x.Is("disk_create") && d.ID != "" {
				x.Reply(201, d)
			}
		}},
	{Name: "A02-no-time", Says: "a snapshot has no time of creation",
		DriverSays: "RackResponseInvalid",
		After: on(func(object map[string]any) { delete(object, "time_created") },
			shownSnapshots...)},
	{Name: "A03-slot", Says: "device_path is the PCI address of the disk's slot",
		After: on(set("device_path", "/dev/pci/0000:00:10.0"), shownDisks...)},
	{Name: "A04-cut", Says: "names are cut after 16 characters", DriverSays: "RackResponseInvalid",
		Before: sends("name", func(name string) string {
			if len(name) >= 64 {
				return name
			}
			return name[:min(len(name), 16)]
		}, "disk_create")},
	{Name: "A05-another-disk", Says: "a read by ID returns another disk",
		DriverSays: "RackResponseInvalid",
		Before: func(x *Interception) {
			id := x.Path.Get("disk")
			if x.Is("disk_view") && uuid.Validate(id) == nil {
				for _, d := range all(x, store.Disks) {
					if d.ID != strings.ToLower(id) {
						x.Request.URL.Path = "/v1/disks/" + d.ID
					}
				}
			}
		}},
	{Name: "A61-tidy", Says: "the rack resolves dots in a path",
		Before: func(x *Interception) {
			url := x.Request.URL
			for _, dots := range []string{"/./", "/disks/../"} {
				url.Path = strings.Replace(url.Path, dots, "/", 1)
			}
		}},
	{Name: "A06-code", Says: "errors about a body have an error_code",
		After: reword(400, "unable to parse JSON body: ", 400, "InvalidRequest", "")},
	{Name: "A07-unsigned", Says: "byte counts have 64 bits without a sign",
		After: reword(400, "value is too large for a byte count", 400, "InvalidValue",
			`unsupported value for "size": total size must be less than 1023 GiB`)},
	{Name: "A08-one-size", Says: "every blank disk has blocks of 512 bytes",
		DriverSays: "EffectUnknown", After: on(set("block_size", 512), shownDisks...)},
	{Name: "A12-no-limit", Says: "the rack reads bodies of more than 1 MiB",
		Before: func(x *Interception) { x.Body = bytes.TrimSpace(x.Body) }},
	{Name: "A70-bad-request", Says: "a description that is too long gets 400",
		After: reword(500, "Internal Server Error", 400, "InvalidValue", "description is too long")},
	{Name: "A14-token-first", Says: "the rack checks the token before it reads anything else",
		Before: func(x *Interception) {
			if x.Operation != "ping" && x.Request.Header.Get("Authorization") == "" {
				x.Refuse(401, "Unauthorized", "credentials missing or invalid")
			}
		}},
	{Name: "A63-last-wins", Says: "of two values of a key, the last one counts",
		Before: func(x *Interception) {
			if body := x.Sent(); body != nil {
				x.Send(body)
			}
		}},
	{Name: "A09-first-page-again", Says: "a page token leads to the first page again",
		DriverSays: "RackResponseInvalid",
		Before: func(x *Interception) {
			if token := x.pageToken(); x.isList() && token != nil {
				x.query(func(query map[string][]string) {
					delete(query, "page_token")
					query["sort_by"] = []string{token["sort_by"]}
					if token["project"] != "" {
						query["project"] = []string{token["project"]}
					}
				})
			}
		}},
	{Name: "A09-one-order", Says: "lists are always in the order of names",
		DriverSays: "RackResponseInvalid",
		Before: func(x *Interception) {
			if x.isList() {
				x.query(func(query map[string][]string) {
					if slices.Contains(query["sort_by"], "id_ascending") {
						query["sort_by"] = []string{"name_ascending"}
					}
				})
			}
		}},
	{Name: "A10-endless", Says: "an empty page also has a token",
		DriverSays: "RackResponseInvalid",
		After: func(x *Interception) {
			if x.isList() && x.Answer.Status == 200 {
				x.EditBody(func(page map[string]any) {
					if page["next_page"] == nil {
						page["next_page"] = x.sameToken()
					}
				})
			}
		}},
	{Name: "A10-no-items", Says: "an empty page has no list", DriverSays: "RackResponseInvalid",
		After: func(x *Interception) {
			if x.isList() && x.Answer.Status == 200 {
				x.EditBody(func(page map[string]any) {
					if items, is := page["items"].([]any); is && len(items) == 0 {
						delete(page, "items")
					}
				})
			}
		}},
	{Name: "A62-first-wins", Says: "of two values of a parameter, the first one counts",
		Before: func(x *Interception) {
			x.query(func(query map[string][]string) {
				for name, values := range query {
					query[name] = values[:1]
				}
			})
		}},
	{Name: "A72-listed", Says: "a list shows disks without device_path",
		After: on(set("device_path", ""), "disk_list")},
	{Name: "A11-forbidden", Says: "a wrong token gets 403",
		After: reword(401, "", 403, "Forbidden", "Forbidden")},
	{Name: "A13-any", Says: "a future version is treated as the newest one",
		Before: func(x *Interception) {
			if x.Request.Header.Get("Api-Version") > "9" {
				x.Request.Header.Del("Api-Version")
			}
		}},
	{Name: "A15-not-found", Says: "a caller who may read but not change an object gets 404",
		DriverSays: "DiskBusy",
		After: func(x *Interception) {
			if x.Answer.Status == 403 && x.Is("disk_delete") {
				x.Refuse(404, "ObjectNotFound", "not found: disk with id %q", x.Path.Get("disk"))
			}
		}},
	{Name: "A21-another-silo", Says: "a request for another silo gets 403",
		After: reword(404, "silo with id", 403, "Forbidden", "Forbidden")},
	{Name: "A18-undone", Says: "a creation is undone if its caller gives up",
		Before: func(x *Interception) {
			if !x.Is("disk_create") || x.Rack.Switches().CreateHold == 0 {
				return
			}
			d := x.halfMade(store.StateCreating)
			x.putDisk(d)
			waited := x.Rack.Pause(x.Request.Context(), time.Duration(x.Rack.Switches().CreateHold))
			_ = x.Rack.Records().Update(func(tx *store.Tx) { store.Disks.Delete(tx, d) })
			if !waited {
				x.Refuse(500, "Internal", "Internal Server Error")
			}
		}},
	{Name: "A19-left-behind", Says: "a creation that fails leaves a faulted disk",
		DriverSays: "DiskFaulted",
		After: func(x *Interception) {
			if x.Is("disk_create") && x.Answer.Status == 500 {
				x.leaveFaulted()
			}
		}},
	{Name: "A22-smaller", Says: "a disk has half the requested size",
		DriverSays: "EffectUnknown",
		After: on(func(disk map[string]any) {
			if size, is := disk["size"].(float64); is {
				disk["size"] = int64(size) / 2
			}
		}, shownDisks...)},
	{Name: "A22-read-only", Says: "new disks are read-only", DriverSays: "EffectUnknown",
		After: on(set("read_only", true), shownDisks...)},
	{Name: "A23-writable", Says: "the rack does not say that a disk is read-only",
		After: on(set("read_only", false), shownDisks...)},
	{Name: "A24-detached", Says: "a deletion fails, and leaves the disk renamed and detached",
		DriverSays: "DiskNotOurs",
		Before: func(x *Interception) {
			if d := x.disk(); x.Is("disk_delete") && d.State.State == store.StateDetached &&
				!strings.HasPrefix(d.Name, "deleted-") {
				d.Name = "deleted-" + d.ID
				x.putDisk(d)
				x.Refuse(500, "Internal", "Internal Server Error")
			}
		}},
	{Name: "A68-name-taken", Says: "the name of a deleted disk stays in use", DriverSays: "DiskBusy",
		Before: func(x *Interception) {
			name, _ := x.Sent()["name"].(string)
			if _, used := usedNames.Load(name); x.Is("disk_create") && used {
				x.Refuse(400, "ObjectAlreadyExists", "already exists: disk %q", name)
			}
			if x.Is("disk_delete") {
				usedNames.Store(x.disk().Name, true)
			}
		}},
	{Name: "A71-attached", Says: "a deletion detaches an attached disk first",
		Before: func(x *Interception) {
			if d := x.disk(); x.Is("disk_delete") && d.State.Instance != "" {
				x.takeAway(d)
			}
		}},
	{Name: "A25-cut", Says: "a larger disk than 1023 GiB gets 1023 GiB",
		Before: sends("size", func(size float64) float64 { return min(size, 1023*gibibyte) },
			"disk_create")},
	{Name: "A26-small-blocks", Says: "a local disk has blocks of 512 bytes",
		DriverSays: "EffectUnknown",
		After: on(func(disk map[string]any) {
			if disk["disk_type"] == store.TypeLocal {
				disk["block_size"] = 512
			}
		}, shownDisks...)},
	{Name: "A27-left-behind", Says: "without space, a creation leaves a faulted disk",
		DriverSays: "DiskFaulted",
		After: func(x *Interception) {
			if x.Is("disk_create") && x.Refused(507, "Insufficient capacity: Not enough storage") {
				x.leaveFaulted()
			}
		}},
	{Name: "A28-name-first", Says: "the name is checked before anything else",
		Before: func(x *Interception) {
			if d := x.namesake(); x.Is("disk_create") && d.ID != "" {
				x.Refuse(400, "ObjectAlreadyExists", "already exists: disk %q", d.Name)
			}
		}},
	{Name: "A29-nothing-counts", Says: "the utilization shows no provisioned storage",
		After: on(provisioned("storage", 0), "utilization_view")},
	{Name: "A16-eight", Says: "an instance takes at most 8 disks, as on racks up to v17",
		Before: func(x *Interception) {
			if x.Is("instance_disk_attach") && len(x.disks()) >= 8 {
				x.Refuse(400, "InvalidRequest", "cannot attach more than 8 disks to instance")
			}
		}},
	{Name: "A17-needs-it-stopped", DriverSays: "InstanceMustBeStopped",
		Says: "no disk can be attached to a running instance, although the rack can hot-plug",
		Before: func(x *Interception) {
			if x.Is("instance_disk_attach") && x.instance().Active() && x.disk().State.Instance == "" {
				x.Refuse(400, "InvalidRequest", "cannot attach disk: instance is not fully stopped")
			}
		}},
	{Name: "A30-across-projects", Says: "an instance can have a disk of another project",
		After: func(x *Interception) {
			if x.Is("instance_disk_attach") && x.Refused(400, "same project") {
				disk := x.disk()
				disk.State = store.DiskState{State: store.StateAttached, Instance: x.instance().ID}
				x.putDisk(disk)
				x.accept(disk)
			}
		}},
	{Name: "A31-attach-without-effect", DriverSays: "DiskBusy",
		Says: "an attach answers that the disk is attached, but does not attach it",
		Before: func(x *Interception) {
			if disk := x.disk(); x.Is("instance_disk_attach") && disk.State.Instance == "" {
				disk.State = store.DiskState{State: store.StateAttached, Instance: x.instance().ID}
				x.accept(disk)
			}
		}},
	{Name: "A31-detach-without-effect", DriverSays: "RackResponseInvalid",
		Says: "the answer to a detach shows the disk as still attached",
		Before: func(x *Interception) {
			if x.Is("instance_disk_detach") {
				x.accept(x.disk())
			}
		}},
	{Name: "A32-refuses-creating", Says: "an attach of a disk in creating is refused",
		Before: ofDisk("instance_disk_attach", "creating", 400, "InvalidRequest",
			"cannot attach disk: invalid state creating")},
	{Name: "A33-refuses-again",
		Says: "an attach of a disk that the instance already has is refused",
		Before: ofDisk("instance_disk_attach", "attached", 400, "InvalidRequest",
			"cannot attach disk: disk is already attached")},
	{Name: "A34-takes-it-away", DriverSays: "DiskAttachedElsewhere",
		Says: "an attach takes the disk from another instance that has it",
		Before: func(x *Interception) {
			disk := x.disk()
			if x.Is("instance_disk_attach") && disk.State.Instance != "" &&
				!disk.AttachedTo(x.instance().ID) && x.instance().ID != "" {
				x.takeAway(disk)
			}
		}},
	{Name: "A35-detaches-local", Says: "a local disk can be detached from a running instance",
		Before: func(x *Interception) {
			if disk := x.disk(); x.Is("instance_disk_detach") && disk.DiskType == store.TypeLocal {
				x.accept(x.takeAway(disk))
			}
		}},
	{Name: "A36-refuses-again", Says: "a detach of a detached disk is refused",
		Before: ofDisk("instance_disk_detach", "detached", 400, "InvalidRequest",
			"cannot detach disk: disk is not attached")},
	{Name: "A37-detaches-elsewhere",
		Says: "a detach ignores which instance the request names",
		Before: func(x *Interception) {
			if disk := x.disk(); x.Is("instance_disk_detach") && disk.State.Instance != "" {
				x.accept(x.takeAway(disk))
			}
		}},
	{Name: "A67-undone", Says: "an attach that answers 503 does nothing",
		After: func(x *Interception) {
			if x.Is("instance_disk_attach") && x.Answer.Status == 503 {
				x.takeAway(x.disk())
			}
		}},
	{Name: "A38-faulted", Says: "a new snapshot is shown as faulted", DriverSays: "DiskBusy",
		After: on(set("state", "faulted"), "snapshot_create")},
	{Name: "A38-another-disk", Says: "a snapshot is of another disk", DriverSays: "EffectUnknown",
		After: on(set("disk_id", uuid.Nil.String()), shownSnapshots...)},
	{Name: "A39-another-code", Says: "a second snapshot of a disk is an internal error",
		After: reword(409, "volume repair lock", 500, "Internal", "Internal Server Error")},
	{Name: "A40-default", Says: "a disk from a snapshot has blocks of 512 bytes",
		After: on(func(disk map[string]any) {
			if disk["snapshot_id"] != nil {
				disk["block_size"] = 512
			}
		}, shownDisks...)},
	{Name: "A41-state-first", Says: "a disk's state is checked before a snapshot's name",
		Before: ofDisk("snapshot_create", store.StateFaulted, 503, "ServiceNotAvailable",
			"Service Unavailable")},
	{Name: "A42-invalid", Says: "a faulted disk cannot be snapshotted: 400",
		After: reword(503, "Service Unavailable", 400, "InvalidRequest",
			"disk cannot be snapshotted in state \"faulted\"")},
	{Name: "A43-kept", Says: "a disk with snapshots cannot be deleted", DriverSays: "DiskBusy",
		Before: func(x *Interception) {
			if id := x.disk().ID; x.Is("disk_delete") && slices.ContainsFunc(all(x, store.Snapshots),
				func(s store.SnapshotRecord) bool { return s.DiskID == id }) {
				x.Refuse(400, "InvalidRequest", "disk cannot be deleted: it has snapshots")
			}
		}},
	{Name: "A44-kind", Says: "the error for a missing image does not name its owner",
		After: func(x *Interception) {
			if name := x.Path.Get("image"); x.Refused(404, "-image with name") {
				x.Refuse(404, "ObjectNotFound", "not found: image with name %q", name)
			}
		}},
	{Name: "A59-blank", Says: "a disk from an unfinished snapshot is blank",
		DriverSays: "SnapshotNotReady",
		Before: func(x *Interception) {
			body := x.Sent()
			backend, _ := body["disk_backend"].(map[string]any)
			source, _ := backend["disk_source"].(map[string]any)
			if id, is := source["snapshot_id"].(string); is && x.Is("disk_create") && slices.ContainsFunc(
				all(x, store.Snapshots), func(s store.SnapshotRecord) bool {
					return s.ID == id && s.State == store.SnapshotCreating
				}) {
				backend["disk_source"] = map[string]any{"type": "blank", "block_size": 512}
				x.Send(body)
			}
		}},
	{Name: "A90-attached", Says: "a disk can be attached before its import",
		Before: func(x *Interception) {
			if d := x.disk(); x.Is("instance_disk_attach") && d.State.State == store.StateImportReady {
				d.State.State = store.StateDetached
				x.putDisk(d)
			}
		}},
	{Name: "A91-quota", Says: "an image counts in the quota",
		After: func(x *Interception) {
			if x.Is("image_create") && x.Answer.Status < 300 {
				x.addStorage(1 << 30)
			}
		}},
	{Name: "A20-never-counts", Says: "the CPUs of an instance never count",
		After: on(provisioned("cpus", 0), "utilization_view")},
	{Name: "A45-starts-while-stopping", Says: "the start of a stopping instance is accepted",
		Before: acceptsIn("instance_start", store.RunStopping)},
	{Name: "A46-stays-failed", Says: "a failed instance stays failed when it is stopped",
		Before: acceptsIn("instance_stop", store.RunFailed)},
	{Name: "A47-accepts-stopped", Says: "the reboot of a stopped instance is accepted",
		Before: acceptsIn("instance_reboot", store.RunStopped)},
	{Name: "A48-keeps-the-disks", DriverSays: "InstanceNotFound",
		Says: "the disks of a deleted instance stay attached to it",
		Before: func(x *Interception) {
			if !x.Is("instance_delete") {
				return
			}
			attached := x.disks()
			if x.Answer = x.Carry(); x.Answer.Status < 300 {
				for _, d := range attached {
					x.putDisk(d)
				}
			}
		}},
	{Name: "A49-keeps-what-is-null", Says: "a null in an update keeps the old value",
		Before: func(x *Interception) {
			if body := x.Sent(); x.Is("instance_update") && body["auto_restart_policy"] == nil {
				body["auto_restart_policy"] = x.instance().AutoRestartPolicy
				x.Send(body)
			}
		}},
	{Name: "A53-stops-while-creating", Says: "the stop of an instance in creating is accepted",
		Before: acceptsIn("instance_stop", store.StateCreating)},
	{Name: "A60-detaches", Says: "an instance that fails loses its disks",
		After: func(x *Interception) {
			if x.Is("instance_reboot") && x.instance().RunState == store.RunFailed {
				for _, d := range x.disks() {
					d.State = store.DiskState{State: store.StateDetached}
					x.putDisk(d)
				}
			}
		}},
	{Name: "A50-long-host", Says: "a host name is cut after 253 characters",
		Before: sends("hostname", func(name string) string { return name[:min(len(name), 253)] },
			"instance_create")},
	{Name: "A51-counts", Says: "the disk of an instance that could not be created counts",
		After: func(x *Interception) {
			if x.Is("instance_create") && x.Refused(400, "attached to another instance") {
				x.addStorage(gibibyte)
			}
		}},
	{Name: "A58-is-failed", Says: "a new instance that cannot be started is failed",
		After: on(set("run_state", store.RunFailed), "instance_create")},
	{Name: "A66-name-first", Says: "the name of an instance is checked first",
		Before: func(x *Interception) {
			name, _ := x.Sent()["name"].(string)
			if x.Is("instance_create") && slices.ContainsFunc(all(x, store.Instances),
				func(i store.Instance) bool { return i.Name == name }) {
				x.Refuse(400, "ObjectAlreadyExists", "already exists: instance %q", name)
			}
		}},
	{Name: "A52-v4-alone", Says: "an interface has IPv4 alone, as on racks up to v18",
		After: on(func(nic map[string]any) {
			stack := nic["ip_stack"].(map[string]any)
			if value := stack["value"].(map[string]any); stack["type"] == "dual_stack" {
				stack["type"], stack["value"] = "v4", value["v4"]
			}
		}, "instance_network_interface_list")},
	{Name: "A64-two-in-a-subnet", Says: "two interfaces may be in one subnet",
		Before: func(x *Interception) {
			body := x.Sent()
			nics, _ := body["network_interfaces"].(map[string]any)
			if params, _ := nics["params"].([]any); x.Is("instance_create") && len(params) == 2 {
				nics["params"] = params[:1]
				x.Send(body)
			}
		}},
	{Name: "A65-all-ports", Says: "a source NAT address has all ports",
		After: on(func(ip map[string]any) { ip["first_port"], ip["last_port"] = 0, 65535 },
			"instance_external_ip_list")},
	// After an attach, most of the mutations below change the disk's device until its next attach.
	{Name: "A54-serial-of-id", DriverSays: "DeviceNotFound",
		Says: "a guest sees the first 20 bytes of a disk's ID as its serial",
		After: plugged(func(disk store.Disk, dir string) error {
			return os.WriteFile(filepath.Join(dir, "device/serial"), []byte(disk.ID[:20]+"\n"), 0o444)
		})},
	{Name: "A54-twice", DriverSays: "DeviceNotUnique",
		Says: "a guest sees each disk as two devices with one serial",
		Before: func(x *Interception) { // before the disk is detached
			if dir := x.device(x.disk()); dir != "" && x.Is("instance_disk_detach") {
				_ = os.RemoveAll(second(dir))
			}
		},
		After: plugged(func(_ store.Disk, dir string) error {
			return os.CopyFS(second(dir), os.DirFS(dir))
		})},
	{Name: "A55-other-serial",
		Says: "the firmware's serial number is not the instance's UUID",
		Guests: func(rack *engine.Simulation, broken bool) error {
			dirs, err := os.ReadDir(rack.Plane().GuestDir(""))
			for _, dir := range dirs {
				id := dir.Name()
				path := filepath.Join(rack.Plane().GuestDir(id), "sys/class/dmi/id/product_serial")
				if broken {
					id = uuid.NewSHA1(uuid.NameSpaceOID, []byte(id)).String()
				}
				err = errors.Join(err, os.WriteFile(path, []byte(id+"\n"), 0o400))
			}
			return err
		}},
	{Name: "A56-spaces", Says: "spaces pad the serials, as the NVMe standard says",
		After: plugged(func(disk store.Disk, dir string) error {
			padded := (disk.Name + strings.Repeat(" ", 20))[:20] + "\n"
			return os.WriteFile(filepath.Join(dir, "device/serial"), []byte(padded), 0o444)
		})},
	{Name: "A57-comes-again", Says: "a detach removes the guest's other devices and adds them again",
		After: func(x *Interception) {
			if !x.Is("instance_disk_detach") {
				return
			}
			for _, disk := range x.disks() {
				if dir := x.device(disk); dir != "" {
					_ = os.WriteFile(filepath.Join(dir, "diskseq"), []byte("1000000\n"), 0o444)
				}
			}
		}},
	{Name: "A69-write-through", Says: "a distributed disk reports no volatile write cache",
		After: plugged(func(_ store.Disk, dir string) error {
			return os.WriteFile(filepath.Join(dir, "queue/write_cache"), []byte("write through\n"), 0o444)
		})},
}

func (x *Interception) pageToken() map[string]string {
	data, _ := base64.URLEncoding.DecodeString(x.Request.URL.Query().Get("page_token"))
	var token struct {
		Start map[string]string `json:"page_start"`
	}
	if json.Unmarshal(data, &token) != nil {
		return nil
	}
	return token.Start
}

// sameToken returns the request's page token. For a request without one, it returns a token that
// continues after the last object, so that the next page is empty.
func (x *Interception) sameToken() string {
	query := x.Request.URL.Query()
	if token := query.Get("page_token"); token != "" {
		return token
	}
	start := map[string]string{"sort_by": "name_ascending", "last_seen": "zzz"}
	if project := query.Get("project"); project != "" {
		start["project"] = project
	}
	text, _ := json.Marshal(map[string]any{"v": "v1", "page_start": start}) // strings always encode
	return base64.URLEncoding.EncodeToString(text)
}

func (x *Interception) leaveFaulted() {
	d := x.halfMade(store.StateFaulted)
	x.putDisk(d)
	x.addStorage(d.Size)
}

func (x *Interception) halfMade(state string) store.Disk {
	body := x.Sent()
	name, _ := body["name"].(string)
	description, _ := body["description"].(string)
	return store.Disk{Identity: store.NewIdentity(uuid.NewString(), name, description),
		ProjectID: x.projectID(), Size: 1 << 30, BlockSize: 4096, DevicePath: "/mnt/" + name,
		DiskType: store.TypeDistributed, State: store.DiskState{State: state}}
}

// usedNames has the names of deleted disks, which A68-name-taken refuses for new disks.
var usedNames sync.Map

func (x *Interception) addStorage(bytes int64) {
	_ = x.Rack.Records().Update(func(tx *store.Tx) { tx.AddStorage(bytes) })
}

const gibibyte = 1 << 30

func provisioned(what string, amount int64) func(map[string]any) {
	return func(body map[string]any) { body["provisioned"].(map[string]any)[what] = amount }
}

func (x *Interception) device(disk store.Disk) string {
	serials, _ := filepath.Glob(filepath.Join(x.Rack.Plane().GuestDir(x.instance().ID),
		"sys/block/*/device/serial"))
	for _, path := range serials {
		text, err := os.ReadFile(path)
		serial := strings.TrimRight(string(text), "\x00\n")
		dir := filepath.Dir(filepath.Dir(path))
		if err == nil && serial == disk.Name[:min(len(disk.Name), 20)] && !strings.HasSuffix(dir, more) {
			return dir
		}
	}
	return ""
}

// more is the suffix of a device that A54-twice adds, such as nvme000n1 beside nvme0n1.
const more = "00n1"

// second returns the directory of A54-twice's second device; dir is the first device's directory.
func second(dir string) string { return strings.TrimSuffix(dir, "n1") + more }

// plugged returns an After function that calls change() with the sysfs directory of a device, after
// the device's disk was attached to a running instance.
func plugged(change func(disk store.Disk, dir string) error) func(*Interception) {
	return func(x *Interception) {
		if !x.Is("instance_disk_attach") || x.Answer.Status >= 300 {
			return
		}
		if dir := x.device(x.disk()); dir != "" {
			if err := change(x.disk(), dir); err != nil {
				x.Refuse(500, "Internal", "Internal Server Error")
			}
		}
	}
}
