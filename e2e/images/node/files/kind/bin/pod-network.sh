#!/bin/sh
# Writes the node's CNI configuration in the place of a network plugin that would have to be
# pulled. The nodes lie in one network of Docker's, so the last part of a node's own address tells
# its pods' range, and the way to the pods of its neighbours.
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

# A pod may start before kube-proxy has made the way to the Services, whose range this is. Nobody on
# the machine's network has these addresses, but its gateway may answer for them all the same, and a
# program keeps the connection on which it was answered. Only TCP: other refusals are ICMP messages,
# of which the kernel sends one a second, and name servers would be waited for.
iptables --append FORWARD --destination 10.96.0.0/16 --protocol tcp --jump REJECT \
	--reject-with tcp-reset
