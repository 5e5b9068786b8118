# The node: it formats and mounts disks on every client. The client's configuration has to allow it:
#
#   plugin "docker" {
#     config {
#       allow_privileged = true
#       volumes { enabled = true }
#     }
#   }

variable "image" {
  type    = string
  default = "oxidecomputer/oxide-csi-plugin-node:v0.1.0"
}

job "oxide-csi-node" {
  type        = "system"
  datacenters = ["*"]

  # Volumes follow allocations to every client, and have to be unmounted there after all others.
  priority = 100

  group "node" {
    task "oxide-plugin" {
      driver = "docker"

      # Lets a running mkfs or repair finish.
      kill_timeout = "60s"

      config {
        image = var.image
        args  = ["--mode=node", "--endpoint=unix:///csi/csi.sock"]

        # Formatting and mounting need CAP_SYS_ADMIN and every disk that may be attached later.
        # Nomad mounts the machine's /dev, and its directories of volumes such that mounts propagate.
        privileged      = true
        readonly_rootfs = true

        # Before it releases a disk, the driver searches the mount namespace of every process.
        pid_mode = "host"

        # Neither the rack nor Nomad is called from here.
        network_mode = "none"

        # The volume records: they outlive the task, but not the machine, like the mounts.
        mount {
          type     = "bind"
          source   = "/run"
          target   = "/host/run"
          readonly = false
        }
      }

      csi_plugin {
        id                     = "csi.oxide.computer"
        type                   = "node"
        mount_dir              = "/csi"
        stage_publish_base_dir = "/local/csi"
        health_timeout         = "60s"
      }

      # The instance's id comes from SMBIOS; set OXIDE_INSTANCE_ID if SMBIOS is hidden.
      env {
        OXIDE_STATE_DIR = "/host/run/csi.oxide.computer"
        OXIDE_TOPOLOGY  = "rack=a"
      }

      resources {
        cpu    = 50
        memory = 64
        # Room for a repair of a large filesystem, if the scheduler has memory oversubscription on.
        memory_max = 1024
      }
    }
  }
}
