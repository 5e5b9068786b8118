# A disk of 50 GiB: nomad volume create volume.hcl

id        = "oxide-postgres-data"
name      = "oxide-postgres-data"
type      = "csi"
plugin_id = "csi.oxide.computer"

capacity_min = "50GiB"
capacity_max = "50GiB"

# The only mode that disks of the rack have; "block-device" gives the disk without a filesystem.
capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}

mount_options {
  fs_type = "ext4"
}

# The driver refuses the empty topology that Nomad asks for otherwise.
topology_request {
  required {
    topology {
      segments = {
        "topology.csi.oxide.computer/rack" = "a"
      }
    }
  }
}

# As a StorageClass has them in Kubernetes: diskType, blockSize, imageId, mkfsOptions.
parameters {
  blockSize = "4096"
}
