# The controller: it creates, attaches and deletes disks. First set how to reach the rack:
#
#   nomad var put nomad/jobs/oxide-csi-controller \
#     host=https://silo.sys.example.com token=@token.txt project=my-project cluster_id=my-cluster
#
# cluster_id is part of the ownership tag of every disk: it has to differ from that of every other
# cluster in the project, and must not change. Without it the controller logs a warning.

variable "image" {
  type    = string
  default = "oxidecomputer/oxide-csi-plugin:v0.1.0"
}

job "oxide-csi-controller" {
  type        = "service"
  datacenters = ["*"]

  group "controller" {
    # Nomad asks one of them at a time; the driver itself copes with any number.
    count = 2

    constraint {
      distinct_hosts = true
    }

    update {
      max_parallel = 1
    }

    task "oxide-plugin" {
      driver = "docker"

      # Nomad's directory for the socket belongs to root and lets nobody else in.
      user = "0:0"

      config {
        image           = var.image
        args            = ["--mode=controller", "--endpoint=unix:///csi/csi.sock"]
        readonly_rootfs = true
        cap_drop        = ["ALL"]
        security_opt    = ["no-new-privileges"]
      }

      # The same id in both jobs makes them one plugin; volumes name it as their plugin_id.
      csi_plugin {
        id             = "csi.oxide.computer"
        type           = "controller"
        mount_dir      = "/csi"
        health_timeout = "60s"
      }

      template {
        destination = "${NOMAD_SECRETS_DIR}/rack.env"
        env         = true
        data        = <<-END
          {{ with nomadVar "nomad/jobs/oxide-csi-controller" }}
          OXIDE_HOST={{ .host }}
          OXIDE_PROJECT={{ .project }}
          OXIDE_CLUSTER_ID={{ .cluster_id }}
          {{ end }}
        END
      }

      # The driver reads the file again when it changes, so a new token needs no restart.
      template {
        destination = "${NOMAD_SECRETS_DIR}/token"
        change_mode = "noop"
        perms       = "0400"
        data        = "{{ with nomadVar \"nomad/jobs/oxide-csi-controller\" }}{{ .token }}{{ end }}"
      }

      # Nomad asks for a topology with every volume. The nodes name the same rack.
      env {
        OXIDE_TOKEN_FILE = "${NOMAD_SECRETS_DIR}/token"
        OXIDE_TOPOLOGY   = "rack=a"
      }

      resources {
        cpu    = 50
        memory = 64
      }
    }
  }
}
