package sanity

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

// mib is the unit in which specs write.
const mib = int64(1) << 20

// nodeScene is a scene with nodes: the driver's node service in the instances a and b.
type nodeScene struct {
	*scene
	a, b *node
}

// node is the driver's node service in one instance.
type node struct {
	*Plugin
	rack     *Rack
	instance Instance
	// dir is where the CO's paths on this node lie.
	dir string
}

// onNodes registers a container whose specs share a scene with nodes.
func onNodes(text string, specs func(s *nodeScene)) bool {
	return Simulated(text, Ordered, ContinueOnFailure, func() {
		s := &nodeScene{scene: &scene{}}
		BeforeAll(func(ctx SpecContext) {
			s.open(ctx, sceneOptions{})
			// At this level anything that leaks into a log does so here.
			loud := PluginOptions{Args: []string{"--log-level=debug"}}
			s.a, s.b = s.node(ctx, "a", loud), s.node(ctx, "b", loud)
			s.rack.Balanced(ctx, s.plugin, s.a.Plugin, s.b.Plugin)
		}, NodeTimeout(2*time.Minute))
		specs(s)
	})
}

// node starts the node service in an instance; it ends with the spec or the container that asks.
func (s *nodeScene) node(ctx context.Context, instance string, options PluginOptions) *node {
	GinkgoHelper()
	options.Mode, options.Instance = ModeNode, instance
	plugin := s.rack.Plugin(ctx, options)
	return &node{Plugin: plugin, rack: s.rack, instance: s.rack.Instance(instance),
		dir: filepath.Join(plugin.Dir, "kubelet")}
}

// device is the path of the node's device with that serial, which must be there and the only one.
func (n *node) device(serial string) string {
	GinkgoHelper()
	paths, err := devicesWith(n.instance, serial)
	Expect(err).NotTo(HaveOccurred())
	Expect(paths).To(HaveLen(1), "devices of instance %s with serial %q", n.instance.Name, serial)
	return paths[0]
}

// devicesWith finds the devices that an instance sees under a serial, as its kernel shows them.
func devicesWith(instance Instance, serial string) ([]string, error) {
	files, err := filepath.Glob(filepath.Join(instance.Guest, "sys/block/*/device/serial"))
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // it was unplugged since the directory was read
		}
		if string(bytes.Trim(text, "\x00 \n")) != serial {
			continue
		}
		name := filepath.Base(filepath.Dir(filepath.Dir(file)))
		paths = append(paths, filepath.Join(instance.Guest, "dev", name))
	}
	return paths, nil
}

// filesystem is the access type mount with that filesystem and these flags.
func filesystem(fsType string, flags ...string) *csi.VolumeCapability {
	capability := mounted()
	capability.AccessType = &csi.VolumeCapability_Mount{
		Mount: &csi.VolumeCapability_MountVolume{FsType: fsType, MountFlags: flags},
	}
	return capability
}

// accesses are all ways in which a workload can have a volume; access is the capability for one.
var accesses = []string{"ext4", "ext3", "xfs", "btrfs", "block"}

func access(name string) *csi.VolumeCapability {
	if name == "block" {
		return raw()
	}
	return filesystem(name)
}

// inMode is the capability in another access mode.
func inMode(
	mode csi.VolumeCapability_AccessMode_Mode, capability *csi.VolumeCapability,
) *csi.VolumeCapability {
	capability.AccessMode = accessMode(mode)
	return capability
}

// placement is a volume on a node: what the CO passes to each of the node's calls.
type placement struct {
	*node
	volume     *csi.Volume
	capability *csi.VolumeCapability
	published  map[string]string
	// staging is a directory, made by the CO; target is made by the driver.
	staging, target string
	readOnly        bool
	secrets         map[string]string
}

// placed attaches the volume to the node's instance. What the spec does not undo is undone when it
// ends.
func (s *nodeScene) placed(
	ctx context.Context, volume *csi.Volume, n *node, capability *csi.VolumeCapability,
) *placement {
	GinkgoHelper()
	p := n.hold(volume, capability)
	p.published = s.published(ctx, volume, n.instance.Name, capability)
	DeferCleanup(func(ctx SpecContext) { p.leave(ctx) }, NodeTimeout(callTimeout))
	return p
}

// hold prepares the paths for a volume on this node, as a CO does.
func (n *node) hold(volume *csi.Volume, capability *csi.VolumeCapability) *placement {
	GinkgoHelper()
	p := &placement{node: n, volume: volume, capability: capability}
	name := fresh("volume")
	p.staging = filepath.Join(n.dir, name, "globalmount")
	p.target = filepath.Join(n.dir, fresh("pod"), name)
	Expect(os.MkdirAll(p.staging, 0o750)).To(Succeed())
	Expect(os.MkdirAll(filepath.Dir(p.target), 0o750)).To(Succeed())
	return p
}

// another is the same volume on the same node for another pod.
func (p *placement) another() *placement {
	GinkgoHelper()
	other := *p
	other.target = filepath.Join(p.dir, fresh("pod"), filepath.Base(p.target))
	Expect(os.MkdirAll(filepath.Dir(other.target), 0o750)).To(Succeed())
	DeferCleanup(func(ctx SpecContext) { Expect(other.unpublish(ctx)).To(Succeed()) },
		NodeTimeout(callTimeout))
	return &other
}

func (p *placement) stage(ctx context.Context) error {
	_, err := p.Node().NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{
		VolumeId: p.volume.GetVolumeId(), StagingTargetPath: p.staging,
		VolumeCapability: p.capability, PublishContext: p.published,
		VolumeContext: p.volume.GetVolumeContext(), Secrets: p.secrets,
	})
	return err
}

func (p *placement) publish(ctx context.Context) error {
	_, err := p.Node().NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: p.volume.GetVolumeId(), StagingTargetPath: p.staging, TargetPath: p.target,
		VolumeCapability: p.capability, Readonly: p.readOnly, PublishContext: p.published,
		VolumeContext: p.volume.GetVolumeContext(), Secrets: p.secrets,
	})
	return err
}

func (p *placement) unpublish(ctx context.Context) error {
	_, err := p.Node().NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{
		VolumeId: p.volume.GetVolumeId(), TargetPath: p.target,
	})
	return err
}

func (p *placement) unstage(ctx context.Context) error {
	_, err := p.Node().NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{
		VolumeId: p.volume.GetVolumeId(), StagingTargetPath: p.staging,
	})
	return err
}

// settle makes the attached volume ready and shows it to the workload; leave undoes both.
func (p *placement) settle(ctx context.Context) {
	GinkgoHelper()
	Expect(p.stage(ctx)).To(Succeed())
	Expect(p.publish(ctx)).To(Succeed())
}

func (p *placement) leave(ctx context.Context) {
	GinkgoHelper()
	Expect(p.unpublish(ctx)).To(Succeed())
	Expect(p.unstage(ctx)).To(Succeed())
}

// settled is a new or a known volume, in use on the node.
func (s *nodeScene) settled(
	ctx context.Context, volume *csi.Volume, n *node, capability *csi.VolumeCapability,
) *placement {
	GinkgoHelper()
	p := s.placed(ctx, volume, n, capability)
	p.settle(ctx)
	return p
}

// detached takes the volume away from its node altogether.
func (s *nodeScene) detached(ctx context.Context, p *placement) {
	GinkgoHelper()
	p.leave(ctx)
	_, err := s.ctl.ControllerUnpublishVolume(ctx, unpublishRequest(p.volume, p.instance.ID))
	Expect(err).NotTo(HaveOccurred())
}

// device is the path of the volume's device on its node.
func (p *placement) device() string {
	GinkgoHelper()
	return p.node.device(p.volume.GetVolumeContext()["diskName"])
}

// pieceSize is how much a spec writes at a time, and pieceStride how far apart pieces lie on a raw
// volume.
const (
	pieceSize   = 4 * mib
	pieceStride = 64 * mib
)

// piece is the content that belongs to a seed, and to no other.
func piece(seed uint64) []byte {
	var key [32]byte
	for i := range 8 {
		key[i] = byte(seed >> (8 * i))
	}
	data := make([]byte, pieceSize)
	_, _ = rand.NewChaCha8(key).Read(data)
	return data
}

// open opens the piece's place: a file of its own in a filesystem, a range of its own on a device.
func (p *placement) open(seed uint64, flags int) (*os.File, error) {
	if p.capability.GetBlock() == nil {
		return os.OpenFile(filepath.Join(p.target, fmt.Sprint("piece-", seed)), flags, 0o640)
	}
	file, err := os.OpenFile(p.target, flags&^os.O_CREATE, 0)
	if err != nil {
		return nil, err
	}
	err = p.rack.Owns(file)
	if err == nil {
		_, err = file.Seek(int64(seed)*pieceStride, io.SeekStart)
	}
	if err != nil {
		_ = file.Close()
		return nil, err
	}
	return file, nil
}

// write writes a piece as a workload does. It does not ask for it to be on the disk: that is what
// unstaging is for.
func (p *placement) write(seed uint64) error { return p.put(seed, false) }

// writeThrough writes a piece and has it on the disk when it returns.
func (p *placement) writeThrough(seed uint64) error { return p.put(seed, true) }

func (p *placement) put(seed uint64, sync bool) error {
	file, err := p.open(seed, os.O_WRONLY|os.O_CREATE)
	if err != nil {
		return err
	}
	_, err = file.Write(piece(seed))
	if err == nil && sync {
		err = file.Sync()
	}
	if closing := file.Close(); err == nil {
		err = closing
	}
	return err
}

// holds says whether the piece is there, byte for byte.
func (p *placement) holds(seed uint64) error {
	file, err := p.open(seed, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer file.Close()
	data := make([]byte, pieceSize)
	if _, err := io.ReadFull(file, data); err != nil {
		return fmt.Errorf("read piece %d: %w", seed, err)
	}
	if !bytes.Equal(data, piece(seed)) {
		return fmt.Errorf("piece %d at %s is not what was written", seed, p.target)
	}
	return nil
}

// mountsAt are the mounts at a path of this namespace, the lowest first.
func mountsAt(path string) []*mountinfo.Info {
	GinkgoHelper()
	mounts, err := mountinfo.GetMounts(func(info *mountinfo.Info) (skip, stop bool) {
		return info.Mountpoint != path, false
	})
	Expect(err).NotTo(HaveOccurred())
	return mounts
}

// logged is what the node has logged so far.
func (n *node) logged() string {
	GinkgoHelper()
	text, err := os.ReadFile(n.LogFile)
	Expect(err).NotTo(HaveOccurred())
	return string(text)
}

// edges are the first and the last MiB of a device, where every format has its marks.
func edges(device string) string {
	GinkgoHelper()
	file, err := os.Open(device)
	Expect(err).NotTo(HaveOccurred())
	defer file.Close()
	end, err := file.Seek(0, io.SeekEnd)
	Expect(err).NotTo(HaveOccurred())
	both := make([]byte, 2*mib)
	_, err = file.ReadAt(both[:mib], 0)
	Expect(err).NotTo(HaveOccurred())
	_, err = file.ReadAt(both[mib:], end-mib)
	Expect(err).NotTo(HaveOccurred())
	return string(both)
}

// blank says whether the edges hold nothing.
func blank(edges string) bool { return strings.Trim(edges, "\x00") == "" }

// writer is a pod that writes a line, has it on the disk, and writes the next one.
type writer struct {
	stop func() (lines int, err error)
}

// keepWriting starts a writer in the volume; it must be stopped.
func (p *placement) keepWriting() writer {
	GinkgoHelper()
	file, err := os.OpenFile(filepath.Join(p.target, "lines"),
		os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o640)
	Expect(err).NotTo(HaveOccurred())
	var (
		lines    int
		fault    error
		stopping = make(chan struct{})
		done     = make(chan struct{})
	)
	go func() {
		defer close(done)
		for fault == nil {
			select {
			case <-stopping:
				return
			default:
			}
			if _, fault = fmt.Fprintln(file, lines); fault == nil {
				if fault = file.Sync(); fault == nil {
					lines++
				}
			}
		}
	}()
	var stopped bool
	w := writer{stop: func() (int, error) {
		if !stopped {
			stopped = true
			close(stopping)
			<-done
			if err := file.Close(); fault == nil {
				fault = err
			}
		}
		return lines, fault
	}}
	DeferCleanup(func() { _, _ = w.stop() })
	return w
}

// holdsLines demands that at least the lines are there that a writer had on the disk, in order.
func (p *placement) holdsLines(lines int) {
	GinkgoHelper()
	text, err := os.ReadFile(filepath.Join(p.target, "lines"))
	Expect(err).NotTo(HaveOccurred())
	found := strings.Fields(string(text))
	Expect(len(found)).To(BeNumerically(">=", lines))
	for i := range lines {
		Expect(found[i]).To(Equal(fmt.Sprint(i)))
	}
}
