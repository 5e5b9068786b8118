# PostgreSQL on the disk of volume.hcl. The password is a Nomad variable:
#
#   nomad var put nomad/jobs/postgres password=change-me

job "postgres" {
  type        = "service"
  datacenters = ["*"]

  group "postgres" {
    # A disk is on one client at a time.
    count = 1

    volume "data" {
      type            = "csi"
      source          = "oxide-postgres-data"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }

    task "postgres" {
      driver = "docker"

      config {
        image = "postgres:17.6"
      }

      volume_mount {
        volume      = "data"
        destination = "/var/lib/postgresql/data"
      }

      template {
        destination = "${NOMAD_SECRETS_DIR}/postgres.env"
        env         = true
        data        = <<-END
          POSTGRES_PASSWORD={{ with nomadVar "nomad/jobs/postgres" }}{{ .password }}{{ end }}
        END
      }

      # A directory of its own below the mount: at its root a new ext4 has lost+found.
      env {
        PGDATA = "/var/lib/postgresql/data/pgdata"
      }

      resources {
        cpu    = 500
        memory = 512
      }
    }
  }
}
