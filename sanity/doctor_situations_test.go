//go:build linux

package sanity

import (
	"context"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// nodeSituations are failing calls of a node, one for each reason and kind of call.
var nodeSituations = []nodeSituation{
	{stageCall, "CapabilityInvalid", staging(func(p *placement) {
		p.Capability = harness.InMode(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
			&csi.VolumeCapability{})
	}), nil},
	{stageCall, "CapabilityUnsupported", staging(func(p *placement) {
		p.Capability = harness.Mounted("ntfs")
	}), nil},
	{stageCall, "UseDiffers", staging(func(p *placement) { p.Capability = harness.Raw() }), nil},
	{stageCall, "UseUnknown", staging(func(p *placement) {
		p.Capability = harness.Raw()
		delete(p.PublishContext, "use")
	}), nil},
	{stageCall, "MountFlagsUnsupported", staging(func(p *placement) {
		p.Capability = harness.Mounted("ext4", "bind")
	}), nil},
	{stageCall, "MkfsOptionsInvalid", staging(func(p *placement) {
		p.Volume.VolumeContext["mkfsOptions"] = "--force"
	}), nil},
	{stageCall, "FieldInvalid", staging(func(p *placement) {
		p.PublishContext["sizeBytes"] = "many"
	}), nil},
	{stageCall, "DiskNameMissing", staging(func(p *placement) {
		p.Volume, p.PublishContext = &csi.Volume{VolumeId: p.Volume.GetVolumeId()}, nil
	}), nil},
	{stageCall, "DiskSizeUnknown", staging(func(p *placement) {
		delete(p.PublishContext, "sizeBytes")
	}), nil},
	{stageCall, "DeviceReadOnly", staging(func(p *placement) {
		p.PublishContext["readOnly"] = "true"
	}), nil},
	{stageCall, "DeviceDiffers", staging(func(p *placement) {
		p.Volume = &csi.Volume{VolumeId: p.Volume.GetVolumeId()}
		p.PublishContext["blockSize"] = "512"
	}), nil},
	{stageCall, "DiskNotBlank", staging(func(p *placement) { write(p.device(), "somebody's") }), nil},
	{stageCall, "WrongFilesystem", staging(func(p *placement) {
		tool("mkfs.ext4", "-q", "-U", someUUID, p.device())
	}), nil},
	{stageCall, "DeviceLocked", staging(func(p *placement) {
		lock, err := p.LockVolumes()
		Expect(err).NotTo(HaveOccurred())
		DeferCleanup(lock.Close)
	}), nil},
	{stageCall, "DeviceNotUnique", staging(func(p *placement) {
		p.showTwin(p.device(), "nvme99n1")
	}), nil},
	{stageCall, "DeviceUnreadable", staging(func(p *placement) {
		var st unix.Stat_t
		Expect(unix.Stat(p.device(), &st)).To(Succeed())
		file, err := harness.BackingFile(st.Rdev)
		Expect(err).NotTo(HaveOccurred())
		Expect(os.Truncate(file, harness.GiB/2)).To(Succeed())
		DeferCleanup(os.Truncate, file, harness.GiB)
	}), nil},
	{stageCall, "DeviceNotFound", appearing(adminapi.DeviceFault{Never: true}), nil},
	{stageCall, "DeviceWrongSize",
		appearing(adminapi.DeviceFault{SizeBytes: adminapi.Size(harness.GiB / 2)}), nil},
	{stageCall, "DeviceChanged", stageOfAnother, nil},
	{stageCall, "DeviceHeld", func(ctx context.Context, f *nodeFixture) (*placement, error) {
		p := f.inUse(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		elsewhere := p.placement(p.Volume, p.Capability)
		elsewhere.PublishContext = p.PublishContext
		return elsewhere, elsewhere.stage(ctx)
	}, nil},
	{stageCall, "DiskProofPending", func(ctx context.Context, f *nodeFixture) (*placement, error) {
		req := harness.CreateRequest(fresh("large"), harness.Mounted(""), harness.Raw())
		req.CapacityRange.RequiredBytes = 200 * harness.GiB
		p := f.attachedTo(ctx, f.created(ctx, req), f.a, harness.Mounted(""))
		brief, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		return p, p.stage(brief)
	}, nil},
	{stageCall, "FilesystemDamaged", damaged("clri <2>", "ssv state 2"), nil},
	{stageCall, "FilesystemFeature", damaged("ssv feature_compat 0x2000"), nil},
	{stageCall, "FilesystemTooLarge", damaged("ssv blocks_count 524288"), nil},
	{stageCall, "LogNotReplayed", func(ctx context.Context, f *nodeFixture) (*placement, error) {
		p := f.inUse(ctx, f.volume(ctx), f.a, harness.Mounted("ext4"))
		p.remove(ctx)
		tool("debugfs", "-w", "-R", "feature needs_recovery", p.device())
		p.PublishContext["readOnly"] = "true"
		return p, p.stage(ctx)
	}, nil},
	{stageCall, "NodeToolFailed", func(ctx context.Context, f *nodeFixture) (*placement, error) {
		n := f.node(ctx, "a", harness.PluginOptions{Env: map[string]string{
			"PATH": toolsWith("mke2fs", "exit 1")}})
		p := f.attachedTo(ctx, f.volume(ctx), n, harness.Mounted(""))
		return p, p.stage(ctx)
	}, nil},
	{stageCall, "StateNotKept", func(ctx context.Context, f *nodeFixture) (*placement, error) {
		n := f.node(ctx, "a", harness.PluginOptions{})
		p := f.attachedTo(ctx, f.volume(ctx), n, harness.Mounted(""))
		Expect(os.RemoveAll(n.stateDir())).To(Succeed())
		Expect(os.WriteFile(n.stateDir(), nil, 0o600)).To(Succeed())
		DeferCleanup(os.Remove, n.stateDir())
		return p, p.stage(ctx)
	}, nil},
	{stageCall, "StagedDifferently", used(func(p *placement) {
		p.Capability = harness.Mounted("ext4", "nodev")
	}, (*placement).stage), nil},

	{publishCall, "NotStaged", func(ctx context.Context, f *nodeFixture) (*placement, error) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		return p, p.publish(ctx)
	}, nil},
	{publishCall, "PathInvalid", func(ctx context.Context, f *nodeFixture) (*placement, error) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		Expect(p.stage(ctx)).To(Succeed())
		Expect(os.WriteFile(p.Target, nil, 0o600)).To(Succeed())
		return p, p.publish(ctx)
	}, nil},
	{publishCall, "FilesystemFailed", func(ctx context.Context, f *nodeFixture) (*placement, error) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted("xfs"))
		Expect(p.stage(ctx)).To(Succeed())
		shutDown(p.Staging)
		return p, p.publish(ctx)
	}, nil},
	{publishCall, "PublishedDifferently", used(func(p *placement) { p.ReadOnly = true },
		(*placement).publish), nil},
	{publishCall, "PublishedElsewhere", func(ctx context.Context, f *nodeFixture) (*placement,
		error) {
		second := f.inUse(ctx, f.volume(ctx, harness.Raw()), f.a, harness.Raw()).another()
		return second, second.publish(ctx)
	}, nil},

	{unpublishCall, "StillMounted", used(func(p *placement) { open(p.Target) },
		(*placement).unpublish), nil},
	{unpublishCall, "PublishedDifferently", used(func(p *placement) { cover(p.Target) },
		(*placement).unpublish), &sight{"mounts", "StillMounted"}},
	{unpublishCall, "TargetNotEmpty", func(ctx context.Context, f *nodeFixture) (*placement, error) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		Expect(p.stage(ctx)).To(Succeed())
		Expect(os.Mkdir(p.Target, 0o750)).To(Succeed())
		open(p.Target)
		DeferCleanup(os.Remove, filepath.Join(p.Target, "open"))
		return p, p.unpublish(ctx)
	}, &sight{"pod", ""}},
	{unstageCall, "StillMounted", used(func(*placement) {}, (*placement).unstage), nil},
	{unstageCall, "StagedDifferently", used(func(p *placement) { cover(p.Staging) },
		(*placement).unstage), &sight{"mounts", "StillMounted"}},
}

// staging stages an attached volume after a change of the request or of the device. The doctor's
// view of the volume is that of the controller.
func staging(change func(*placement)) func(context.Context, *nodeFixture) (*placement, error) {
	return func(ctx context.Context, f *nodeFixture) (*placement, error) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted("ext4"))
		eventually(ctx, p.shown)
		changed := *p
		changed.PublishContext = maps.Clone(p.PublishContext)
		changed.Volume = &csi.Volume{VolumeId: p.Volume.GetVolumeId(),
			VolumeContext: maps.Clone(p.Volume.GetVolumeContext())}
		change(&changed)
		return p, changed.stage(ctx)
	}
}

// used calls the node for a volume in use, after a change.
func used(change func(*placement), call func(*placement, context.Context) error) func(
	context.Context, *nodeFixture) (*placement, error) {
	return func(ctx context.Context, f *nodeFixture) (*placement, error) {
		p := f.inUse(ctx, f.volume(ctx), f.a, harness.Mounted("ext4"))
		changed := *p
		change(&changed)
		return p, call(&changed, ctx)
	}
}

// appearing stages a volume whose device differs from the rack's description.
func appearing(how adminapi.DeviceFault) func(context.Context, *nodeFixture) (*placement, error) {
	return func(ctx context.Context, f *nodeFixture) (*placement, error) {
		f.fault(ctx, adminapi.Fault{Operation: "instance_disk_attach", Times: 1, Device: &how})
		p := f.attachedTo(ctx, f.volume(ctx), f.impatientNode(ctx), harness.Mounted(""))
		if !how.Never {
			eventually(ctx, p.shown)
		}
		return p, p.stage(ctx)
	}
}

// stageOfAnother stages a volume whose node in /dev belongs to another device.
func stageOfAnother(ctx context.Context, f *nodeFixture) (*placement, error) {
	p := f.attachedTo(ctx, f.volume(ctx), f.impatientNode(ctx), harness.Mounted(""))
	other := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted(""))
	device, aside := p.device(), p.device()+".aside"
	Expect(os.Rename(device, aside)).To(Succeed())
	DeferCleanup(os.Rename, aside, device)
	Expect(os.Link(other.device(), device)).To(Succeed())
	return p, p.stage(ctx)
}

// damaged stages a volume whose filesystem was changed with debugfs.
func damaged(changes ...string) func(context.Context, *nodeFixture) (*placement, error) {
	return func(ctx context.Context, f *nodeFixture) (*placement, error) {
		p := f.inUse(ctx, f.volume(ctx), f.a, harness.Mounted("ext4"))
		p.remove(ctx)
		for _, change := range changes {
			tool("debugfs", "-w", "-R", change, p.device())
		}
		return p, p.stage(ctx)
	}
}

func tool(name string, args ...string) {
	GinkgoHelper()
	out, err := exec.Command(name, args...).CombinedOutput()
	Expect(err).NotTo(HaveOccurred(), "%s", out)
}

// write writes to the start of a device.
func write(device, text string) {
	GinkgoHelper()
	file, err := os.OpenFile(device, os.O_WRONLY, 0)
	Expect(err).NotTo(HaveOccurred())
	defer file.Close()
	_, err = file.WriteString(text)
	Expect(err).NotTo(HaveOccurred())
	Expect(file.Sync()).To(Succeed())
}

// open keeps a file open in a directory until the spec ends.
func open(dir string) {
	GinkgoHelper()
	file, err := os.Create(filepath.Join(dir, "open"))
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(file.Close)
}

// cover mounts something over a path until the spec ends.
func cover(path string) {
	GinkgoHelper()
	Expect(unix.Mount("tmpfs", path, "tmpfs", 0, "size=1m")).To(Succeed())
	DeferCleanup(unix.Unmount, path, 0)
}
