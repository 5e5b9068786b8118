package simulator

import (
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

func parseDiskCreate(f *fields) any { return readDiskCreate(f) }

func readDiskCreate(f *fields) engine.DiskCreate {
	var c engine.DiskCreate
	c.Name, c.Description = f.identity()
	c.Size = f.byteCount("size")
	backend := f.object("disk_backend")
	c.Backend = backend.variant(store.TypeLocal, store.TypeDistributed)
	if c.Backend == store.TypeLocal {
		c.Source.BlockSize = engine.LocalBlockSize
		return c
	}
	source := backend.object("disk_source")
	c.Source.Kind = source.variant(engine.SourceBlank, engine.SourceSnapshot, engine.SourceImage,
		engine.SourceImporting)
	switch c.Source.Kind {
	case engine.SourceBlank, engine.SourceImporting:
		c.Source.BlockSize = source.blockSize("block_size")
	case engine.SourceSnapshot:
		c.Source.ID = source.uuid("snapshot_id")
		c.Source.ReadOnly = source.flag("read_only", false)
	case engine.SourceImage:
		c.Source.ID = source.uuid("image_id")
		c.Source.ReadOnly = source.flag("read_only", false)
	}
	return c
}

func parseSnapshotCreate(f *fields) any {
	name, description := f.identity()
	return engine.SnapshotCreate{Name: name, Description: description, Disk: f.nameOrID("disk")}
}

func parseDiskPath(f *fields) any { return f.nameOrID("disk") }

func parseBulkWrite(f *fields) any {
	var w engine.BulkWrite
	f.read("offset", "u64", &w.Offset)
	w.Base64 = f.text("base64_encoded_data")
	return w
}

// parseFinalize returns the name of the snapshot, or "".
func parseFinalize(f *fields) any {
	if !f.has("snapshot_name") {
		return ""
	}
	return f.name("snapshot_name")
}

func parseImageCreate(f *fields) any {
	var c engine.ImageCreate
	c.Name, c.Description = f.identity()
	c.OS, c.Version = f.text("os"), f.text("version")
	source := f.object("source")
	source.variant("snapshot")
	c.SnapshotID = source.uuid("id")
	return c
}
