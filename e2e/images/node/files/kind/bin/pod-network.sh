#!/bin/sh
# Writes the node's CNI configuration. It replaces a network plugin, whose image would be pulled.
# All nodes are in one Docker network. The last byte of a node's address determines the address
# range of its pods. Each node gets routes to the ranges of all others.
set -eu

own=$(ip -4 -o address show dev eth0 | awk '{ split($4, a, "/"); print a[1]; exit }')
network=${own%.*}
number=${own##*.}

mkdir -p /etc/cni/net.d
cat >/etc/cni/net.d/10-ptp.conflist <<EOF
{
  "cniVersion": "0.4.0",
  "name": "ptp",
  "plugins": [
    {
      "type": "ptp",
      "ipMasq": true,
      "ipam": {
        "type": "host-local",
        "dataDir": "/run/cni-ipam-state",
        "ranges": [[{"subnet": "10.244.$number.0/24"}]],
        "routes": [{"dst": "0.0.0.0/0"}]
      }
    },
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
EOF

for neighbour in $(seq 2 30); do
	test "$neighbour" = "$number" ||
		ip route replace "10.244.$neighbour.0/24" via "$network.$neighbour"
done

# Reject TCP connections to Services, which have these addresses. A pod may start before kube-proxy
# has set up its rules. Then the machine's gateway might accept a connection, and the program would
# keep it. Do not reject UDP: that sends ICMP messages, at most one a second, so that clients would
# wait for their name server.
iptables --append FORWARD --destination 10.96.0.0/16 --protocol tcp --jump REJECT \
	--reject-with tcp-reset
